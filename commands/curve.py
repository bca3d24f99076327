"""`moereplay curve`: misses at every capacity, from one pass over the demand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moereplay.commands import options
from moereplay.commands.cores import CORES
from moereplay.commands.groups import grouped
from moereplay.commands.interrupt import keeping
from moereplay.commands.settings import CurveSettings
from moereplay.commands.terminal import say, say_when_compiling, show, show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moereplay.simulator.curves.curve import Curve
    from moereplay.traces.schema import Trace

#: Capacities of the table; files and --json hold all.
SHOWN = ("1%", "2%", "5%", "10%", "25%", "50%", "75%", "100%")


@grouped
def curve(
    trace: options.TracePath,
    *,
    eviction: Annotated[
        str,
        typer.Option(help="Comma list of lru, belady, relaxed_belady; empty: lru, belady."),
    ] = "",
    settings: CurveSettings,
    platform: Annotated[str, typer.Option(help="Replay here what depends on a machine's times.")] = "",
    engine: options.Engine = "compiled",
    workers: Annotated[int, typer.Option(help="Replays at once.")] = CORES,
    as_json: Annotated[bool, typer.Option("--json", help="One policy's curve as one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for one Parquet file per curve; plot reads it.")] = None,
) -> None:
    """Count misses at every capacity in one pass: LRU and Belady, without prefetch. SIMULATED."""
    from moereplay.results.outputs import check_output
    from moereplay.simulator.curves.rows import to_row, write_curve
    from moereplay.traces.store import open_trace

    opened, how = open_trace(trace), settings.lists()
    names = _names(opened, eviction, how, as_json)
    _check_replays(platform, engine)
    if out:
        check_output(out / "curve")
    curves: list[Curve] = []
    with keeping(lambda: f"{len(curves)} of {len(names)} curves are whole"):
        for name in names:
            made = _decided(opened, _counted(opened, name, how), platform, engine, workers)
            curves.append(made)
            if out:  # at once: an interrupted run keeps what it has
                say(f"wrote {write_curve(out, made)}")
    if as_json:
        show_json(to_row(curves[0]))
    else:
        _report(opened, curves)


def _names(trace: Trace, eviction: str, how: Mapping[str, str], as_json: bool) -> list[str]:
    """The policies to count, checked before the first is. Raises ConfigError or PolicyError."""
    from moereplay.simulator.curves.curve import REPLAYED, offered, settings
    from moereplay.simulator.errors import ConfigError

    usual = [name for name in REPLAYED if name in offered(trace.geometry, how["scope"])]
    listed = [name.strip() for name in eviction.split(",")] if eviction else usual
    names = list(dict.fromkeys(listed))
    for name in names:
        settings(trace.geometry, name, **how)
    if as_json and len(names) > 1:
        raise ConfigError(f"--json takes one policy, not {len(names)}; add --eviction {names[0]}, or use --out DIR")
    if not eviction and len(names) < len(REPLAYED):
        say("no curve of belady: experts of a pool differ in bytes, so that more room can cost it hits; see per_layer")
    return names


def _check_replays(machine: str, engine: str) -> None:
    """Raises ConfigError for an unknown machine or engine before anything is counted."""
    from moereplay.simulator.platform_files import platform
    from moereplay.simulator.replay import check_engine

    check_engine(engine)
    if machine:
        platform(machine)


def _counted(trace: Trace, policy: str, how: Mapping[str, str]) -> Curve:
    from moereplay.commands.progress_bar import progress
    from moereplay.simulator.curves.curve import curve, is_ready
    from moereplay.traces.passes import schedule

    if not is_ready(policy):
        say(f"compiling the count of {policy}, once for this version; some seconds")
    steps = len(schedule(trace, how["passes"])) * trace.geometry.layers
    with progress(steps, f"steps, {policy}") as advance:
        return curve(trace, policy, **how, capacities=list(_bytes_shown(trace, how["scope"]).values()), done=advance)


def _decided(trace: Trace, made: Curve, platform: str, engine: str, workers: int) -> Curve:
    """The curve; capacities whose counts depend on times are replayed on the platform, if one is named."""
    from moereplay.commands.progress_bar import progress
    from moereplay.sweeps.grid import decide, undecided

    if not platform or made.decided.all():
        return made
    say_when_compiling()
    with progress(len(undecided(made, platform)), f"replays, {made.policy}") as advance:
        return decide(trace, made, platform, workers, advance, engine)


def _bytes_shown(trace: Trace, scope: str) -> dict[str, int]:
    """The capacities of the table that hold an expert, in bytes of all pools, exactly as replays round them."""
    from moereplay.simulator.capacity import parse_capacity
    from moereplay.simulator.errors import ConfigError

    known = {}
    for text in SHOWN:
        try:
            known[text] = parse_capacity(text, trace.geometry, scope, (trace.geometry.expert_bytes,)).total
        except ConfigError:  # less than one expert
            continue
    return known


def _report(trace: Trace, curves: list[Curve]) -> None:
    from moereplay.analysis.heading import simulated
    from moereplay.analysis.tables import table
    from moereplay.results.settings import NAMES, OF_CURVES

    first = curves[0]
    settings = "; ".join(f"{name} {getattr(first.config, name)}" for name in NAMES if name in OF_CURVES)
    show(
        *simulated(trace),
        f"{settings}; no prefetch",
        f"{first.accesses:,} accesses; {first.compulsory:,} of them are compulsory misses at any capacity",
        *(f"{made.policy}: {line}" for made in curves for line in _gaps(made)),
        "",
        table([_line(curves, text, size) for text, size in _bytes_shown(trace, first.config.scope).items()]),
    )


def _line(curves: list[Curve], text: str, size: int) -> dict[str, object]:
    from moereplay.analysis.tables import Share

    first = curves[0]
    line: dict[str, object] = {"capacity": text, "experts": size * first.experts / first.total_bytes}
    for made in curves:
        misses = _misses(made, size)
        line[f"{made.policy} misses"] = misses
        line[f"{made.policy} hits"] = None if misses is None else Share(1 - misses / max(1, made.accesses))
    return line


def _misses(made: Curve, size: int) -> int | None:
    from moereplay.simulator.errors import ConfigError

    try:
        return made.misses_at(size)
    except ConfigError:  # times decide
        return None


def _gaps(made: Curve) -> list[str]:
    """Remarks on capacities whose counts depend on times: how many, and which platform they were replayed on."""
    left = made.replayed if made.platform else ~made.decided
    if not left.any():
        return []
    experts = made.capacity_experts[left]
    many = f"{len(experts):,} of {len(left):,} capacities, from {experts[0]:.4g} to {experts[-1]:.4g} experts,"
    reason = "hold less than a step demands, so that a machine's times decide"
    told = f"they were replayed on {made.platform}" if made.platform else "--platform NAME replays them"
    return [f"{many} {reason}; {told}"]
