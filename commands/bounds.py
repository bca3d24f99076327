"""`moereplay bounds` computes upper bounds on hit rate and throughput, `curve` the misses at every capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from moereplay.analysis.gap import LEGEND, drawn, flat, gap_of
from moereplay.analysis.ranking import simulated
from moereplay.analysis.tables import Share, table
from moereplay.analysis.tables import csv as as_csv
from moereplay.commands import options
from moereplay.commands.options import CORES, CurveSettings, OfBounds, grouped
from moereplay.commands.terminal import keeping, progress, say, say_when_compiling, show, show_json
from moereplay.policies.grammar import parse
from moereplay.results.errors import check_output
from moereplay.results.remarks import seconds_in_words, within
from moereplay.results.result import METRICS, values_of
from moereplay.results.settings import NAMES, OF_BOUNDS, OF_CURVES, older
from moereplay.simulator.capacity import parse_capacity
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.curves.curve import REPLAYED, Curve, is_ready, offered, settings, to_row, write_curve
from moereplay.simulator.curves.curve import curve as counted_curve
from moereplay.simulator.curves.division import best_division
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.limits.choices import Freedom, freedom
from moereplay.simulator.limits.limits import Limits, limits
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import check_engine
from moereplay.sweeps.grid import Outcome, decide, run_grid, undecided
from moereplay.traces.drafts import OFF, parse_drafts
from moereplay.traces.passes import named_schedule, schedule
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace

TWICE = "2k"  #: candidates per token for routing by default


class Routing(NamedTuple):
    """Freedom of routing to deviate from the router's choice."""

    top_m: Annotated[str, typer.Option(help="Let routing choose any k of the best M: 12, or 2k.")] = ""
    top_j: Annotated[int, typer.Option(min=0, help="Always run the best J experts of each token.")] = 0
    mass: Annotated[float | None, typer.Option(help="Minimum share of gate weight that routing keeps: .9.")] = None


@grouped
def bounds(
    trace: options.TracePath,
    *,
    settings: OfBounds,
    policy_file: options.PolicyFiles = None,
    routing: Routing,
    workers: Annotated[int, typer.Option(help="Number of parallel replays.")] = CORES,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV, with all digits.")] = False,
) -> None:
    """Compute upper bounds for better eviction, prefetch and routing, and split misses by cause. SIMULATED."""
    if as_json and csv:
        raise ConfigError("--json and --csv are mutually exclusive")
    opened = open_trace(trace)
    free = _freedom(opened, routing)
    documents = _documents(opened, list(settings.preset_names()), free, workers)
    if as_json:
        show_json({"trace": opened.digest, "bounds": documents})
    elif csv:
        print(as_csv(flat(documents)))
    else:
        _report_bounds(opened, documents, free)


def _freedom(trace: Trace, asked: Routing) -> Freedom | None:
    """Return the freedom of routing as given, else 2k candidates if the trace has logits."""
    if asked.top_m or asked.mass is not None or asked.top_j or "logits" in trace.arrays:
        top_m = asked.top_m or ("" if asked.mass is not None else TWICE)
        return freedom(trace, top_m, asked.top_j, asked.mass)
    return None


def _documents(trace: Trace, configs: list[ReplayConfig], free: Freedom | None, workers: int) -> list[dict[str, Any]]:
    """Return a document per combination of settings other than eviction."""
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
    """Return settings, limits and the policies that were replayed."""
    least, fixed, routed = found.least, found.fixed, found.routed
    return {
        "config": {name: getattr(config, name) for name in OF_BOUNDS if name != "eviction"},
        "capacity_forms": replays[0][0].about["capacity_forms"],
        "seconds": seconds_in_words(replays[0][0].about),
        "accesses": found.accesses,
        "limits": {
            "compulsory": found.compulsory,
            "relaxed": found.relaxed,
            "forced": found.forced,
            "relaxed_reached": found.relaxed_reached,
            "forced_reached": found.forced_reached,
            "fixed_preloaded": fixed and fixed.preloaded,
            "fixed_loaded_once": fixed and fixed.loaded_once,
            "complete_steps": found.complete and found.complete.at_most,
            "complete_steps_reached": found.complete and found.complete.at_least,
            "steps": found.complete and found.complete.steps,
            "routed": routed and free and {"freedom": free.text, **routed._asdict()},
            "time_ns": least and least.time_ns,
            "tokens_per_s": least and METRICS["tokens_per_s"].value(least._asdict()),
        },
        "policies": [_policy(outcome, found) for outcome in replays],
        "reasons": list(found.reasons),
    }


def _policy(outcome: Outcome, found: Limits) -> dict[str, Any]:
    """Return a replay's misses and time, and its misses by cause."""
    result, _ = outcome
    eviction, misses = result.config["eviction"], result.totals["misses"]
    chosen = parse("eviction", eviction)
    rejects = chosen.policy.admit is not None and chosen.policy.declines(chosen.params)
    gap = None
    if found.relaxed is not None and found.compulsory is not None and found.forced is not None:
        gap = gap_of(misses, found.compulsory, found.relaxed, None if rejects else found.forced)
    return {
        "eviction": eviction,
        "misses": misses,
        "complete_steps": result.totals["complete_steps"],
        "time_ns": result.totals["time_ns"],
        "tokens_per_s": values_of(result)["tokens_per_s"],
        "gap": gap and asdict(gap) | {"admission_share": gap.admission_share},
    }


def _report_bounds(trace: Trace, documents: Sequence[dict[str, Any]], free: Freedom | None) -> None:
    show(*simulated(trace))
    for document in documents:
        capacity = document["config"]["capacity"]
        held = document["capacity_forms"].removeprefix(f"{capacity} = ")
        varied = {name: value for name, value in document["config"].items() if name != "capacity" and value != ""}
        settings = "; ".join(f"{name} {value}" for name, value in varied.items())
        seconds = f"seconds of {document['config']['platform']}: {document['seconds']}"
        show("", f"capacity {capacity}: {held}", settings, seconds, "")
        show(*drawn(document))
    show("", *LEGEND)
    show(*(f"routing: {free.text}" for _ in (1,) if free))
    for reason in dict.fromkeys(reason for document in documents for reason in document["reasons"]):
        show(reason)
    if free is None:
        say("no bound for other routing: the trace has no router logits; record them with `moereplay record`")


# -- curve

#: Capacities in the table; files and --json have all of them.
SHOWN = ("1%", "2%", "5%", "10%", "25%", "50%", "75%", "100%")


@grouped
def curve(
    trace: options.TracePath,
    *,
    eviction: Annotated[
        str,
        typer.Option(help="Comma list of lru, belady, relaxed_belady (default: lru, belady)."),
    ] = "",
    settings: CurveSettings,
    platform: Annotated[
        str, typer.Option(help="Platform on which to replay capacities whose counts depend on times.")
    ] = "",
    engine: options.Engine = "compiled",
    divide: Annotated[
        str, typer.Option(help="Divide these capacities over layers so that least is missed: comma list of 25%, 8GB.")
    ] = "",
    workers: Annotated[int, typer.Option(help="Number of parallel replays.")] = CORES,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the curve of one policy, or divisions, as one JSON document.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for one Parquet file per curve; `plot` reads it.")] = None,
) -> None:
    """Count misses at every capacity in one pass: LRU and Belady, without prefetch. SIMULATED."""
    opened, how = open_trace(trace), settings.lists() | settings.fixed()
    totals = _totals(opened, divide, how["scope"])
    options.refuse_both(divide=divide, platform=platform)
    names = _names(opened, eviction, how, as_json and not divide)
    _check_replays(platform, engine)
    if out:
        check_output(out / "curve")
    curves: list[Curve] = []
    with keeping(lambda: f"{len(curves)} of {len(names)} curves are complete"):
        for name in names:
            made = _decided(opened, _counted(opened, name, how), platform, engine, workers)
            curves.append(made)
            if out:  # at once, so that an interrupted run keeps its curves
                say(f"wrote {write_curve(out, made)}")
    divisions = [row for made in curves if divide for row in _divisions(opened, made, totals)]
    if divisions and as_json:
        show_json({"trace": opened.digest, "config": _given(curves[0]), "divisions": divisions})
    elif divisions:
        _report_divisions(opened, curves[0], divisions)
    elif as_json:
        show_json(to_row(curves[0]))
    else:
        _report_curves(opened, curves)


def _names(trace: Trace, eviction: str, how: Mapping[str, Any], as_json: bool) -> list[str]:
    """Return the policies to count, checked before the first count. Raises ConfigError or PolicyError."""
    known = offered(trace.geometry, how["scope"])
    usual = REPLAYED if "belady" in known else known
    listed = [name.strip() for name in eviction.split(",")] if eviction else usual
    names = list(dict.fromkeys(listed))
    for name in names:
        settings(trace.geometry, name, **how)
    if as_json and len(names) > 1:
        raise ConfigError(f"--json requires one policy, not {len(names)}: add --eviction {names[0]}, or use --out DIR")
    if not eviction and "belady" not in known:
        say(
            "no curve of belady: experts of a pool differ in size, so more room can cost hits; relaxed_belady bounds "
            "it at the capacities of the table, --scope per_layer has it"
        )
    return names


def _check_replays(machine: str, engine: str) -> None:
    """Raises ConfigError for an unknown platform or engine, before anything is counted."""
    check_engine(engine)
    if machine:
        platform(machine)


def _counted(trace: Trace, policy: str, how: Mapping[str, Any], more: Sequence[int] = ()) -> Curve:
    """Count a curve at the capacities of the table as well, and at `more`, in bytes."""
    if not is_ready(policy):
        say(f"compiling the count of {policy} (a few seconds, first run only)")
    passes = schedule(trace, named_schedule(how["passes"], parse_drafts(how["draft"]).text, how["seed"]))
    steps = len(passes) * trace.geometry.layers
    with progress(steps, f"steps, {policy}") as advance:
        return counted_curve(
            trace, policy, **how, capacities=[*_bytes_shown(trace, how["scope"]).values(), *more], done=advance
        )


def _decided(trace: Trace, made: Curve, platform: str, engine: str, workers: int) -> Curve:
    """Replay capacities whose counts depend on times, if a platform is given."""
    if not platform or made.decided.all():
        return made
    say_when_compiling()
    with progress(len(undecided(made, platform)), f"replays, {made.policy}") as advance:
        return decide(trace, made, platform, workers, advance, engine)


def _bytes_shown(trace: Trace, scope: str) -> dict[str, int]:
    """Return the capacities of the table that hold an expert, in bytes of all pools, rounded as in replays."""
    known = {}
    for text in SHOWN:
        try:
            known[text] = _bytes_of(trace, text, scope)
        except ConfigError:  # too small for one expert
            continue
    return known


def _bytes_of(trace: Trace, text: str, scope: str) -> int:
    return parse_capacity(text, trace.geometry, scope, (trace.geometry.expert_bytes,)).total


def _given(first: Curve) -> dict[str, Any]:
    """Return the settings of curves."""
    given = {name: getattr(first.config, name) for name in NAMES if name in OF_CURVES}
    return given | ({"seed": first.config.seed} if first.config.draft != OFF else {})


def _head(trace: Trace, first: Curve) -> list[str]:
    """Return what the numbers are of, and the settings of the curves."""
    given = _given(first)
    settings = "; ".join(f"{name} {value}" for name, value in given.items() if value != older().get(name))
    return [*simulated(trace), f"{settings}; no prefetch"]


def _report_curves(trace: Trace, curves: list[Curve]) -> None:
    first = curves[0]
    show(
        *_head(trace, first),
        f"{first.accesses:,} accesses; {first.compulsory:,} of them are compulsory misses at any capacity",
        *(f"{made.policy}: {line}" for made in curves for line in (*_gaps(made), *_uncertain(made))),
        "",
        table(
            [_line(curves, text, size) for text, size in _bytes_shown(trace, first.config.scope).items()],
            spare=[f"{made.policy} complete" for made in reversed(curves)],
        ),
    )


def _line(curves: list[Curve], text: str, size: int) -> dict[str, object]:
    first = curves[0]
    line: dict[str, object] = {"capacity": text, "experts": size * first.experts / first.total_bytes}
    for made in curves:
        misses, complete = _if_decided(made.misses_at, size), _if_decided(made.complete_at, size)
        line[f"{made.policy} misses"] = misses
        line[f"{made.policy} hits"] = None if misses is None else Share(1 - misses / max(1, made.accesses))
        line[f"{made.policy} complete"] = None if complete is None else Share(complete / max(1, made.steps))
    return line


def _if_decided(count: Callable[[int], int | None], size: int) -> int | None:
    try:
        return count(size)
    except ConfigError:  # depends on times
        return None


def _uncertain(made: Curve) -> list[str]:
    """Return how far the most hits are known, where experts of a pool differ in bytes."""
    if made.bracket is None:
        return []
    gap = float((made.bracket[1] - made.bracket[0]).max(initial=0)) / max(1, made.accesses)
    return [f"upper bound on hits, as experts of a pool differ in bytes; {within(gap)}"]


def _gaps(made: Curve) -> list[str]:
    """Return remarks on capacities whose counts depend on times."""
    left = made.replayed if made.platform else ~made.decided
    if not left.any():
        return []
    experts = made.capacity_experts[left]
    many = f"{len(experts):,} of {len(left):,} capacities, from {experts[0]:.4g} to {experts[-1]:.4g} experts,"
    reason = "hold less than one step demands, so their counts depend on times"
    action = f"they were replayed on {made.platform}" if made.platform else "--platform NAME replays them"
    return [f"{many} {reason}; {action}"]


# -- curve --divide


def _totals(trace: Trace, divide: str, scope: str) -> dict[str, int]:
    """Return the capacities to divide, in bytes of one pool. Raises ConfigError, also if equal pools hold no expert."""
    if not divide:
        return {}
    if scope != "per_layer":
        raise ConfigError("--divide requires --scope per_layer: layers with pools of their own")
    texts = [text.strip() for text in divide.split(",")]
    for text in texts:
        _bytes_of(trace, text, "per_layer")
    return {text: _bytes_of(trace, text, "global") for text in texts}


def _divisions(trace: Trace, made: Curve, totals: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the best division of each total, beside equal pools and one pool of the same bytes."""
    best = {text: best_division(made, trace.geometry, total) for text, total in totals.items()}
    whole = None  # in one pool, only LRU has an exact curve if experts differ in bytes
    if made.policy == "lru" or len(set(trace.geometry.expert_bytes)) == 1:
        how = {name: getattr(made.config, name) for name in (*OF_CURVES, "seed")} | {"scope": "global"}
        whole = _counted(trace, made.policy, how, list(totals.values()))
    found = []
    for text, division in best.items():
        equal = _if_decided(made.misses_at, _bytes_of(trace, text, "per_layer"))
        one = whole and _if_decided(whole.misses_at, totals[text])
        found.append(
            {"policy": made.policy, "total": text, "misses": division.misses}
            | {"equal_pools_misses": equal, "one_pool_misses": one}
            | {"fewer_than_equal": _fewer(division.misses, equal), "fewer_than_one": _fewer(division.misses, one)}
            | {"least_experts": division.least, "capacity": division.capacity}
        )
    return found


def _fewer(misses: int, than: int | None) -> float | None:
    """Return the share of misses that is saved; negative if there are more."""
    return (than - misses) / than if than else None


#: Columns of the table of divisions; `--json` has the keys.
HEADS = {"policy": "policy", "total": "total", "misses": "divided", "equal_pools_misses": "equal pools"}
HEADS |= {"one_pool_misses": "one pool", "fewer_than_equal": "fewer than equal", "fewer_than_one": "fewer than one"}


def _report_divisions(trace: Trace, first: Curve, found: Sequence[dict[str, Any]]) -> None:
    lines = [
        {
            HEADS[name]: Share(value) if isinstance(value, float) else value
            for name, value in row.items()
            if name in HEADS
        }
        for row in found
    ]
    least = max(row["least_experts"] for row in found)
    show(
        *_head(trace, first),
        *[f"pools of at least {least} experts, below which times decide"] * (least > 1),
        "",
        table(lines, more="--json"),
        "",
        *(f"{row['policy']} at {row['total']}: --scope per_layer --capacity {row['capacity']}" for row in found),
    )
