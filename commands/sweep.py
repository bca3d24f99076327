"""`moereplay sweep run`: every configuration of an experiment file, on every core or a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from moereplay.commands.checks import Checks
from moereplay.commands.options import CORES, PolicyFiles, grouped
from moereplay.commands.terminal import INTERRUPTED, clock, interruptible, keeping, say, show_json

if TYPE_CHECKING:
    from moereplay.sweeps.checks import Checker
    from moereplay.sweeps.clusters import Shards
    from moereplay.sweeps.dispatch import Progress
    from moereplay.sweeps.jobs import Job
    from moereplay.sweeps.run import Start, Sweep
    from moereplay.sweeps.store import Place


MOST_NAMED = 5  #: errors that are printed in full
EXECUTORS = ("local", "ray", "slurm")


class Machines(NamedTuple):
    """Who replays, and how many at once."""

    executor: Annotated[str, typer.Option(help="local | ray | slurm.")] = "local"
    workers: Annotated[int, typer.Option(min=1, help="Replays at once; on slurm, in each job.")] = CORES
    address: Annotated[str, typer.Option(help="ray: of a running cluster, auto to find it; default a new one.")] = ""
    nodes: Annotated[int, typer.Option(min=1, help="slurm: jobs, each a shard on a node.")] = 1
    slurm: Annotated[list[str] | None, typer.Option("--slurm", help="slurm: name=value, as submitit's.")] = None


@grouped
def sweep_run(
    file: Annotated[Path, typer.Argument(help="Experiment, TOML or YAML.", show_default=False)],
    *,
    out: Annotated[str, typer.Option(help="Folder, or URL as s3://bucket/name; what is there is not rerun.")] = "sweep",
    changes: Annotated[list[str] | None, typer.Option("--set", help="table.key=value, over the file's.")] = None,
    engine: Annotated[str, typer.Option(help="Default: the fastest.", show_default=False)] = "",
    shard: Annotated[str, typer.Option(help="i/n: this part of the sweep only; parts share --out.")] = "1/1",
    machines: Machines,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost; replay three.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Impossible combinations become rows.")] = False,
    policy_file: PolicyFiles = None,
    checks: Checks,
) -> None:
    """Run every configuration of an experiment, resuming what is in --out. SIMULATED.

    With --every, one of every N is then measured, or run live.
    """
    from moereplay.simulator.replay import ENGINES, check_engine
    from moereplay.sweeps.jobs import parse_shard
    from moereplay.sweeps.jobs import shard as part_of
    from moereplay.sweeps.run import left_to_do, planned
    from moereplay.sweeps.store import place_of

    file = file.resolve() if machines.executor == "slurm" else file  # nodes may start elsewhere
    engine = engine or ENGINES[0]
    check_engine(engine)
    sweep = planned(file, changes or (), keep_going)
    share = part_of(sweep.jobs, parse_shard(shard))
    place = place_of(out)
    checker = _checker(checks, sweep, share, machines.executor, out)
    jobs = left_to_do(sweep, place, share)
    _say_plan(sweep, share, jobs)
    if dry_run:
        refused = {refusal.job.key for refusal in sweep.refusals}
        ready = [job for job in jobs if job.key not in refused]
        _say_estimate(ready, engine, machines.workers, sweep.experiment.keeps_requests)
    elif machines.executor == "slurm" and jobs:
        from moereplay.policies.files import registered
        from moereplay.sweeps.clusters import Shards

        how = (tuple(changes or ()), place, engine, machines.workers, machines.nodes, keep_going)
        _submit(Shards(file, *how, tuple(registered()), tuple(sys.argv)), machines.slurm or [])
    else:
        gave_up = bool(jobs) and _run(sweep, jobs, place, engine, _starter(machines, engine))
        if checker:
            _check(checker, sweep, share, place, checks.every or 1)
        if gave_up:
            raise typer.Exit(1)
    if not dry_run:
        say(f"wrote {out}/part-*/")
        say(f"next: moereplay sweep show {out}")
        say(f"figures: moereplay plot {out}")


def _checker(checks: Checks, sweep: Sweep, share: list[Job], executor: str, out: str) -> Checker | None:
    """What checks configurations, if that is wanted. Raises ConfigError for where it cannot be done."""
    from moereplay.commands.checks import checker_of
    from moereplay.simulator.errors import ConfigError
    from moereplay.sweeps.objects import is_url

    if checks.every is not None and executor == "slurm":
        raise ConfigError("--every: checks run on this machine, alone; run them when the jobs of slurm have ended")
    if checks.every is not None and is_url(out):
        raise ConfigError(f"--every: checks are kept in a folder, and --out is {out}; name a folder")
    return checker_of(checks, sweep.traces, (job.config.platform for job in share if job.kind == "configuration"))


def _check(checker: Checker, sweep: Sweep, share: list[Job], out: Place, every: int) -> None:
    """Of the configurations that have a result, in their order."""
    from moereplay.commands.checks import checked
    from moereplay.sweeps.run import left_to_do

    jobs = [job for job in share if job.kind == "configuration"]
    without = {job.key for job in left_to_do(sweep, out, jobs)}
    ran = [job for job in jobs if job.key not in without]
    checked(checker, sweep.traces, out.local(), ran, lambda kept: kept.chosen(ran, every))


def _run(sweep: Sweep, jobs: list[Job], out: Place, engine: str, start: Start) -> bool:
    """Whether some jobs were given up."""
    from moereplay.commands.progress import SweepMeter
    from moereplay.sweeps.run import derive, execute

    meter, kept = SweepMeter(), f"what is stored in {out} stays; run the same command to resume"
    with keeping(lambda: kept):
        derive(sweep, jobs)  # may take a minute, and nothing is in flight yet
    with keeping(lambda: kept), interruptible() as stopping:
        try:
            progress = execute(sweep, jobs, out, engine, start, meter.show, stopping)
        finally:
            meter.close()
    _say_ending(progress)
    return bool(progress.killers)


def _starter(machines: Machines, engine: str) -> Start:
    from moereplay.simulator.errors import ConfigError
    from moereplay.sweeps.local import LocalExecutor
    from moereplay.sweeps.run import NOGIL
    from moereplay.traces.texts import hint

    executor, workers = machines.executor, machines.workers
    if executor == "local":
        return lambda out, provenance: LocalExecutor(workers, engine == NOGIL, out, provenance)
    if executor == "ray":
        from moereplay.sweeps.clusters import RayExecutor

        return lambda out, provenance: RayExecutor(machines.address, workers, out, provenance)
    raise ConfigError(f"no executor called {executor!r}: {hint(executor, EXECUTORS)}")


def _submit(shards: Shards, given: list[str]) -> None:
    from moereplay.sweeps.clusters import options_of, run_shards

    for line in run_shards(shards, options_of(given)):
        say(line)


def _say_plan(sweep: Sweep, share: list[Job], jobs: list[Job]) -> None:
    from moereplay.sweeps.run import notes, surpluses

    bounds = sum(job.kind == "bound" for job in share)
    traces = f"{len(sweep.traces)} trace{'s' if len(sweep.traces) > 1 else ''}"
    done = len(share) - len(jobs)
    say(
        f"{sweep.file.name}: {len(share) - bounds:,} configurations and {bounds:,} bounds on {traces}"
        + (f", {done:,} already stored" if done else "")
    )
    for line in surpluses(sweep)[:MOST_NAMED]:
        say(f"warning: {line}")
    for line in notes(sweep)[:MOST_NAMED]:
        say(f"note: {line}")
    for job, reason in sweep.refusals[:MOST_NAMED]:
        say(f"will be an error row: {job.name}: {reason}")


def _say_estimate(jobs: list[Job], engine: str, workers: int, requests: bool) -> None:
    from moereplay.sweeps.run import estimate
    from moereplay.traces.texts import size

    if not jobs:
        return
    cost = estimate(jobs, engine, workers)
    print(f"replays      {len(jobs):,} to run, {cost.replay_seconds:.3g} s each (mean, from {cost.sampled} timed)")
    print(f"time         about {clock(cost.seconds)} with {min(workers, len(jobs))} workers, engine {engine}")
    if cost.process_bytes is not None:
        print(f"memory       about {cost.process_bytes / 2**20:,.0f} MiB per process")
    if requests:
        print(f"storage      about {size(cost.request_bytes)} for rows of requests (`requests = false` keeps none)")


def _say_ending(progress: Progress) -> None:
    errors = list(progress.errors.items())
    for (_, identity), reason in errors[:MOST_NAMED]:
        say(f"error row: {identity}: {reason}")
    for reason in progress.killers.values():
        say(f"given up: {reason}")
    if len(errors) > MOST_NAMED:
        say(f"and {len(errors) - MOST_NAMED:,} more error rows; `sweep show --errors` lists them")
    if progress.stopped:
        say(f"stopped with {progress.done:,} of {progress.total:,} done; run the same command to resume")
        raise typer.Exit(INTERRUPTED)


# -- `moereplay sweep merge`: results of any number of runs as one set of tables.


def sweep_merge(
    results: Annotated[list[str], typer.Argument(help="Folders or URLs that `sweep run` wrote.", show_default=False)],
    out: Annotated[str, typer.Option(help="A new folder or URL.", show_default=False)],
) -> None:
    """Merge results: each configuration once, sorted; the same bytes whatever the way of running."""
    from moereplay.sweeps.parts import merge
    from moereplay.sweeps.store import place_of

    merged = merge([place_of(each) for each in results], place_of(out))
    failed = f" and {merged.errors:,} error rows" if merged.errors else ""
    say(f"wrote {merged.where}: {merged.configurations:,} configurations{failed}")


# -- `moereplay sweep schema`: the JSON Schema of experiment files, for editors.


def sweep_schema() -> None:
    """Print the JSON Schema of experiment files, from which editors complete and check."""
    from moereplay.sweeps.experiment.schema import json_schema

    show_json(json_schema())
