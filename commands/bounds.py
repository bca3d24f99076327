"""`moereplay bounds`: how far policies could be improved, and by what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands import options
from moereplay.commands.cores import CORES
from moereplay.commands.groups import grouped
from moereplay.commands.settings import OfBounds
from moereplay.commands.terminal import say, say_when_compiling, show, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moereplay.simulator.config import ReplayConfig
    from moereplay.simulator.limits.choices import Freedom
    from moereplay.simulator.limits.limits import Limits
    from moereplay.sweeps.grid import Outcome
    from moereplay.traces.schema import Trace

TWICE = "2k"  #: what routing may choose among unless it is said


class Routing(NamedTuple):
    """How far routing may leave the router's choice."""

    top_m: Annotated[str, typer.Option(help="Routing may choose any k of the best M: 12, or 2k.")] = ""
    top_j: Annotated[int, typer.Option(min=0, help="The best J of each token always run.")] = 0
    mass: Annotated[float | None, typer.Option(help="Routing keeps this share of the gate mass: .9.")] = None


@grouped
def bounds(
    trace: options.TracePath,
    *,
    settings: OfBounds,
    policy_file: options.PolicyFiles = None,
    routing: Routing,
    workers: Annotated[int, typer.Option(help="Replays at once.")] = CORES,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The rows as CSV, all digits.")] = False,
) -> None:
    """Say what limits policies: evictions, prefetch, routing; and what their misses are made of. SIMULATED."""
    from moereplay.analysis.gap import flat
    from moereplay.analysis.tables import csv as as_csv
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.store import open_trace

    if as_json and csv:
        raise ConfigError("--json and --csv are two ways to print; give one")
    opened = open_trace(trace)
    free = _freedom(opened, routing)
    documents = _documents(opened, list(settings.called()), free, workers)
    if as_json:
        show_json({"trace": opened.digest, "bounds": documents})
    elif csv:
        print(as_csv(flat(documents)))
    else:
        _report(opened, documents, free)


def _freedom(trace: Trace, asked: Routing) -> Freedom | None:
    """As asked; unless it is, of twice k where the trace has what that needs."""
    from moereplay.simulator.limits.choices import freedom

    if asked.top_m or asked.mass is not None or asked.top_j or "logits" in trace.arrays:
        top_m = asked.top_m or ("" if asked.mass is not None else TWICE)
        return freedom(trace, top_m, asked.top_j, asked.mass)
    return None


def _documents(trace: Trace, configs: list[ReplayConfig], free: Freedom | None, workers: int) -> list[dict[str, Any]]:
    """One for each combination of settings other than the eviction."""
    from moereplay.commands.progress_bar import progress
    from moereplay.simulator.limits.limits import limits
    from moereplay.sweeps.grid import run_grid

    say_when_compiling()
    with progress(len(configs), "replays") as advance:
        outcomes = list(run_grid(trace, configs, workers, done=advance))
    groups: dict[ReplayConfig, list[Outcome]] = {}
    for config, outcome in zip(configs, outcomes, strict=True):
        groups.setdefault(config.model_copy(update={"eviction": "lru"}), []).append(outcome)
    with progress(len(groups), "limits") as advance:
        made = []
        for config, replays in groups.items():
            made.append(_document(config, limits(trace, config, free), free, replays))
            advance()
        return made


def _document(config: ReplayConfig, found: Limits, free: Freedom | None, replays: Sequence[Outcome]) -> dict[str, Any]:
    """Settings, limits, and the policies replayed under them."""
    from moereplay.results.settings import OF_BOUNDS

    least, fixed, routed = found.least, found.fixed, found.routed
    return {
        "config": {name: getattr(config, name) for name in OF_BOUNDS if name != "eviction"},
        "capacity_forms": replays[0][0].about["capacity_forms"],
        "accesses": found.accesses,
        "limits": {
            "compulsory": found.compulsory,
            "relaxed": found.relaxed,
            "forced": found.forced,
            "fixed_preloaded": fixed and fixed.preloaded,
            "fixed_loaded_once": fixed and fixed.loaded_once,
            "routed": routed and free and {"freedom": free.text, **routed._asdict()},
            "time_ns": least and least.time_ns,
            "tokens_per_s": _speed(least.decode_passes, least.decode_ns) if least else None,
        },
        "policies": [_policy(outcome, found) for outcome in replays],
        "reasons": list(found.reasons),
    }


def _policy(outcome: Outcome, found: Limits) -> dict[str, Any]:
    """A replay beside the limits, and its misses in parts."""
    from dataclasses import asdict

    from moereplay.analysis.gap import gap_of
    from moereplay.policies.grammar import parse

    result, _ = outcome
    eviction, misses = result.config["eviction"], result.totals["misses"]
    chosen = parse("eviction", eviction)
    rejects = chosen.policy.admit is not None and chosen.policy.declines(chosen.params)
    gap = None
    if found.relaxed is not None and found.compulsory is not None and found.forced is not None:
        gap = gap_of(misses, found.compulsory, found.relaxed, None if rejects else found.forced)
    spent, passes = (sum(row[name] for row in result.per_request) for name in ("decode_ns", "decode_passes"))
    return {
        "eviction": eviction,
        "misses": misses,
        "time_ns": result.totals["time_ns"],
        "tokens_per_s": _speed(passes, spent),
        "gap": gap and asdict(gap) | {"admission_share": gap.admission_share},
    }


def _speed(passes: int, spent: int) -> float | None:
    return passes / spent * 1e9 if spent else None


def _report(trace: Trace, documents: Sequence[dict[str, Any]], free: Freedom | None) -> None:
    from moereplay.analysis.gap import LEGEND, drawn
    from moereplay.analysis.heading import simulated

    show(*simulated(trace))
    for document in documents:
        told = {name: value for name, value in document["config"].items() if name != "capacity" and value != ""}
        settings = "; ".join(f"{name} {value}" for name, value in told.items())
        show("", f"capacity {document['config']['capacity']}: {document['capacity_forms']}", settings, "")
        show(*drawn(document))
    show("", *LEGEND)
    show(*(f"routing: {free.text}" for _ in (1,) if free))
    for reason in dict.fromkeys(reason for document in documents for reason in document["reasons"]):
        show(reason)
    if free is None:
        say("no bound over other routing: this trace has no router logits; record them with `moereplay record`")
