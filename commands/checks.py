"""`--every N` of `sweep run` and `tune`: measure some configurations, or run them live, and compare with replays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from moereplay.analysis.checks import Candidate, summary
from moereplay.commands.model_options import slow_tier_of
from moereplay.commands.terminal import INTERRUPTED, interruptible, keeping, progress, say, say_when_compiling
from moereplay.commands.validate import as_recorded, folder_of, loaded_for
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.checks import Checker, Chosen
from moereplay.sweeps.checks import Checks as Kept
from moereplay.sweeps.jobs import Job
from moereplay.tracegen.errors import require_torch
from moereplay.tracegen.offload.part import require_place, slow_tier_named, throttle_named
from moereplay.tracegen.plan import check_device
from moereplay.traces.schema import Trace

MOST_NAMED = 5  #: maximum number of skipped configurations that are printed


class Checks(NamedTuple):
    """Configurations to check, one of two ways to check them, and the part of the trace."""

    every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Check one of every N configurations, with --slow-tier or --live.", show_default=False
        ),
    ] = None
    slow_tier: Annotated[
        str | None, typer.Option(help="With --every: slow tier to measure on (disk:DIR, disk:DIR:buffered, pinned).")
    ] = None
    live: Annotated[
        str | None, typer.Option(help="With --every: model to run live (miniature, a folder or a Hugging Face id).")
    ] = None
    device: Annotated[str, typer.Option(help="With --every: device, cpu or cuda (default: cpu, with --live auto).")] = (
        ""
    )
    throttle: Annotated[
        str | None, typer.Option(help="With --slow-tier: upper bound on the read rate, such as 400MB/s.")
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="With --live: data type, such as float32 (default: as recorded).")
    ] = None
    layers: Annotated[int | None, typer.Option(min=1, help="With --slow-tier: number of layers (default: 4).")] = None
    check_tokens: Annotated[
        int | None, typer.Option(min=2, help="With --slow-tier: tokens to decode (default: 16).")
    ] = None
    check_prompt: Annotated[
        int | None, typer.Option(min=0, help="With --slow-tier: prompt tokens, processed in one pass (default: 0).")
    ] = None
    check_requests: Annotated[int | None, typer.Option(min=1, help="With --live: number of requests (default: 1).")] = (
        None
    )


#: Options that require one of the two ways.
BESIDE = {
    "slow_tier": ("throttle", "layers", "check_tokens", "check_prompt"),
    "live": ("dtype", "check_requests"),
}


def checker_of(asked: Checks, traces: Sequence[Trace], platforms: Iterable[str]) -> Checker | None:
    """Return the checker of configurations, None without --every. Errors are raised before anything is replayed."""
    way = _way(asked)
    if way is None:
        return None
    require_torch()
    found = _running(asked, traces) if way == "live" else _measuring(asked, traces, platforms)
    for trace in traces:
        found.how(trace)  # raises ConfigError for a trace with too few tokens
    return found


def _way(asked: Checks) -> str | None:
    """Return slow_tier or live. Raises ConfigError for options that cannot be combined."""
    ways = [name for name in BESIDE if getattr(asked, name) is not None]
    given = [name for name in Checks._fields[1:] if getattr(asked, name) not in (None, "")]
    if asked.every is None:
        if given:
            raise ConfigError(f"{_option(given[0])} requires --every N")
        return None
    if len(ways) != 1:
        raise ConfigError(
            "--every requires exactly one of --slow-tier disk:DIR (or pinned), to measure on this machine, and "
            "--live MODEL, to run the model"
        )
    for name in (name for other in BESIDE for name in BESIDE[other] if other not in ways):
        if getattr(asked, name) is not None:
            raise ConfigError(f"{_option(name)} cannot be combined with {_option(ways[0])}")
    return ways[0]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _measuring(asked: Checks, traces: Sequence[Trace], platforms: Iterable[str]) -> Checker:
    named, device = asked.slow_tier or "", asked.device or "cpu"
    part = (asked.layers or 4, asked.check_prompt or 0, asked.check_tokens or 16)
    throttle = throttle_named(asked.throttle or "none")
    require_place(slow_tier_named(named), device)
    from moereplay.tracegen.live.checks import Measuring

    found = Measuring(
        named, lambda geometry, bits: slow_tier_of(named, device, geometry, bits), device, throttle, *part
    )
    found.check_calibrated(platforms, traces[0].header.provenance.model)
    return found


def _running(asked: Checks, traces: Sequence[Trace]) -> Checker:
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
    """Run the chosen checks that are not stored yet, and print the errors of replays. Raises Exit if interrupted."""
    say_when_compiling()
    kept = Kept(checker, traces, folder)
    kept_words = f"finished checks are kept in {folder}; run the same command to resume"
    with keeping(lambda: kept_words), interruptible() as stopping:
        found = choose(kept)
        _say_skipped(found)
        left = kept.left(found.jobs)
        with progress(len(left), "checks") as done:
            kept.run(left, done, stopping)
        candidates = []
        for job in jobs:
            settings = {name: str(value) for name, value in job.config.model_dump(mode="json").items()}
            settings["trace"] = job.digest[:12]
            candidates.append(Candidate(job.identity, settings, job.config.policy_set().open_loop))
        for line in summary(kept.found(jobs), candidates):
            say(line)
        if stopping():
            say(f"stopped: {kept_words}")
            raise typer.Exit(INTERRUPTED)


def _say_skipped(found: Chosen) -> None:
    for job, reason in found.skipped[:MOST_NAMED]:
        say(f"not checked: {job.name}: {reason}")
    if len(found.skipped) > MOST_NAMED:
        say(f"and {len(found.skipped) - MOST_NAMED:,} more that cannot be checked")
    if not found.jobs:
        say("nothing was checked: no configuration with a result can be checked")
