"""`--every N` of `sweep run` and `tune`: some configurations are measured, or run live, beside their replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.commands.terminal import INTERRUPTED, interruptible, keeping, say, say_when_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moereplay.analysis.checks import Candidate
    from moereplay.sweeps.checks import Checker, Chosen
    from moereplay.sweeps.checks import Checks as Kept
    from moereplay.sweeps.jobs import Job
    from moereplay.traces.schema import Trace

MOST_NAMED = 5  #: skipped configurations that are printed in full


class Checks(NamedTuple):
    """Which configurations are checked, in which of two ways, and on how much of a trace."""

    every: Annotated[
        int | None,
        typer.Option(min=1, help="Check one of every N, with --slow-tier or --live.", show_default=False),
    ] = None
    slow_tier: Annotated[
        str | None, typer.Option(help="Of --every: measured here; disk:DIR, disk:DIR:buffered or pinned.")
    ] = None
    live: Annotated[str | None, typer.Option(help="Of --every: run live; miniature, a folder or an id.")] = None
    device: Annotated[str, typer.Option(help="Of a check: cpu, cuda; unsaid cpu, and auto of --live.")] = ""
    throttle: Annotated[str | None, typer.Option(help="Of --slow-tier: its fastest, as 400MB/s.")] = None
    dtype: Annotated[str | None, typer.Option(help="Of --live: float32, ...; unsaid as recorded.")] = None
    layers: Annotated[int | None, typer.Option(min=1, help="Of --slow-tier: the first layers only; 4 unsaid.")] = None
    check_tokens: Annotated[int | None, typer.Option(min=2, help="Of --slow-tier: decoded tokens; 16 unsaid.")] = None
    check_prompt: Annotated[
        int | None, typer.Option(min=0, help="Of --slow-tier: tokens before them in one pass; 0 unsaid.")
    ] = None
    check_requests: Annotated[int | None, typer.Option(min=1, help="Of --live: the first requests; 1 unsaid.")] = None


#: Options that mean something only beside one of the two ways.
BESIDE = {
    "slow_tier": ("throttle", "layers", "check_tokens", "check_prompt"),
    "live": ("dtype", "check_requests"),
}


def checker_of(asked: Checks, traces: Sequence[Trace], platforms: Iterable[str]) -> Checker | None:
    """What checks configurations, None without --every. Raises what refuses it, before anything is replayed."""
    way = _way(asked)
    if way is None:
        return None
    from moereplay.tracegen.errors import require_torch

    require_torch()
    found = _running(asked, traces) if way == "live" else _measuring(asked, traces, platforms)
    for trace in traces:
        found.how(trace)  # or it has too few tokens
    return found


def _way(asked: Checks) -> str | None:
    """slow_tier or live. Raises ConfigError for options that do not go together."""
    from moereplay.simulator.errors import ConfigError

    ways = [name for name in BESIDE if getattr(asked, name) is not None]
    given = [name for name in Checks._fields[1:] if getattr(asked, name) not in (None, "")]
    if asked.every is None:
        if given:
            raise ConfigError(f"{_option(given[0])} says how configurations are checked; say how many, with --every N")
        return None
    if len(ways) != 1:
        raise ConfigError(
            f"--every {asked.every}: give either --slow-tier disk:DIR or pinned, to measure on this machine, "
            "or --live MODEL, to run the model"
        )
    for name in (name for other in BESIDE for name in BESIDE[other] if other not in ways):
        if getattr(asked, name) is not None:
            raise ConfigError(f"{_option(name)} means nothing beside {_option(ways[0])}; leave one of them out")
    return ways[0]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _measuring(asked: Checks, traces: Sequence[Trace], platforms: Iterable[str]) -> Checker:
    from moereplay.commands.model_options import slow_tier_of
    from moereplay.tracegen.offload.part import require_place, slow_tier_named, throttle_named

    named, device = asked.slow_tier or "", asked.device or "cpu"
    part = (asked.layers or 4, asked.check_prompt or 0, asked.check_tokens or 16)
    throttle = throttle_named(asked.throttle or "none")
    require_place(slow_tier_named(named), device)
    from moereplay.tracegen.offload.checks import Measuring

    found = Measuring(
        named, lambda geometry, bits: slow_tier_of(named, device, geometry, bits), device, throttle, *part
    )
    found.check_calibrated(platforms, traces[0].header.provenance.model)
    return found


def _running(asked: Checks, traces: Sequence[Trace]) -> Checker:
    from moereplay.commands.validate import as_recorded, folder_of, loaded_for
    from moereplay.tracegen.plan import check_device

    device, named = asked.device or "auto", asked.live or ""
    check_device(device)
    folder = folder_of(traces[0], named)
    stored = {trace.digest: as_recorded(trace, asked.dtype or "", None) | {"device": device} for trace in traces}
    from moereplay.tracegen.live.checks import Running

    model = folder.name + (f" in {asked.dtype}" if asked.dtype else "")
    return Running(
        lambda trace: loaded_for(trace, folder, stored[trace.digest]), model, device, asked.check_requests or 1
    )


def checked(
    checker: Checker, traces: Sequence[Trace], folder: Path, jobs: Sequence[Job], choose: Callable[[Kept], Chosen]
) -> None:
    """Run the checks that are chosen of jobs and not kept yet, and say how far their replays are off.

    Raises Exit if it was interrupted.
    """
    from moereplay.analysis.checks import summary
    from moereplay.commands.progress import progress
    from moereplay.sweeps.checks import Checks as Kept

    say_when_compiling()
    kept = Kept(checker, traces, folder)
    what = f"every check that was complete stays in {folder}; run the same command to resume"
    with keeping(lambda: what), interruptible() as stopping:
        found = choose(kept)
        _say_skipped(found)
        left = kept.left(found.jobs)
        with progress(len(left), "checks") as done:
            kept.run(left, done, stopping)
        for line in summary(kept.found(jobs), [_candidate(job) for job in jobs]):
            say(line)
        if stopping():
            say(f"stopped: {what}")
            raise typer.Exit(INTERRUPTED)


def _candidate(job: Job) -> Candidate:
    from moereplay.analysis.checks import Candidate

    settings = {name: str(value) for name, value in job.config.model_dump(mode="json").items()}
    return Candidate(job.identity, settings | {"trace": job.digest[:12]}, job.config.policy_set().open_loop)


def _say_skipped(found: Chosen) -> None:
    for job, reason in found.skipped[:MOST_NAMED]:
        say(f"not checked: {job.name}: {reason}")
    if len(found.skipped) > MOST_NAMED:
        say(f"and {len(found.skipped) - MOST_NAMED:,} more that cannot be checked")
    if not found.jobs:
        say("nothing was checked: no configuration that has a result can be")
