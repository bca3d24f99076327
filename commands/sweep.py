"""`moereplay sweep run`, `merge`, `schema`: run an experiment file on all cores or a cluster; `tune`: search it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from moereplay.analysis.tables import table
from moereplay.commands.checks import Checks, checked, checker_of
from moereplay.commands.options import CORES, PolicyFiles, grouped
from moereplay.commands.terminal import (
    INTERRUPTED,
    SweepMeter,
    clock,
    interruptible,
    keeping,
    progress,
    say,
    say_shared,
    show,
    show_json,
)
from moereplay.policies.files import registered
from moereplay.policies.grammar import foresight
from moereplay.results.remarks import assumptions
from moereplay.results.result import METRICS, named
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import ENGINES, check_engine
from moereplay.sweeps.checks import Checker
from moereplay.sweeps.clusters import STARTING_MIN, TIMES, RayExecutor, Shards, limited, options_of, run_shards
from moereplay.sweeps.experiment.expand import platforms
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.experiment.schema import json_schema
from moereplay.sweeps.jobs import Job, open_traces, parse_shard
from moereplay.sweeps.jobs import shard as part_of
from moereplay.sweeps.local import LocalExecutor
from moereplay.sweeps.parts import merge, sweep_provenance
from moereplay.sweeps.run import (
    NOGIL,
    Progress,
    Start,
    Sweep,
    derive,
    estimate,
    execute,
    left_to_do,
    notes,
    planned,
    surpluses,
)
from moereplay.sweeps.store import Folder, Place, is_url, place_of
from moereplay.sweeps.tune import Found, Search, check, jobs_found, platforms_of, tried
from moereplay.sweeps.tune import tune as search_by
from moereplay.traces.documents import json_text
from moereplay.traces.summary import synthetic
from moereplay.traces.texts import counted, hint, size, typed

MOST_NAMED = 5  #: maximum number of errors that are printed
EXECUTORS = ("local", "ray", "slurm")


Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Override an entry of the file: table.key=value (repeatable).")
]


class Machines(NamedTuple):
    """Executor of the replays, and its parallelism."""

    executor: Annotated[str, typer.Option(help="Where to run: local, ray or slurm.")] = "local"
    workers: Annotated[int, typer.Option(min=1, help="Number of parallel replays; with slurm, per job.")] = CORES
    address: Annotated[
        str, typer.Option(help="With ray: address of a running cluster, or auto (default: start a new one).")
    ] = ""
    nodes: Annotated[int, typer.Option(min=1, help="With slurm: number of jobs, each a shard on a node.")] = 1
    slurm: Annotated[
        list[str] | None, typer.Option("--slurm", help="With slurm: option of submitit, name=value (repeatable).")
    ] = None


@grouped
def sweep_run(
    file: Annotated[Path, typer.Argument(help="Experiment file, TOML or YAML.", show_default=False)],
    *,
    out: Annotated[
        str, typer.Option(help="Folder, or URL such as s3://bucket/name; stored configurations are not rerun.")
    ] = "sweep",
    changes: Changes = None,
    engine: Annotated[str, typer.Option(help="compiled or reference (default: compiled).", show_default=False)] = "",
    shard: Annotated[str, typer.Option(help="Run part i of n only: i/n; parts share --out.")] = "1/1",
    machines: Machines,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate the cost from up to five sample replays and exit.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Record invalid combinations as error rows.")
    ] = False,
    policy_file: PolicyFiles = None,
    checks: Checks,
) -> None:
    """Run every configuration of an experiment that is not stored in --out yet. SIMULATED.

    With --every, one configuration of every N is also measured, or run live.
    """
    file = file.resolve() if machines.executor == "slurm" else file  # nodes may start elsewhere
    engine = engine or ENGINES[0]
    check_engine(engine)
    sweep = planned(file, changes or (), keep_going)
    share = part_of(sweep.jobs, parse_shard(shard))
    place = place_of(out)
    checker = _checker(checks, sweep, share, machines.executor, out)
    jobs = left_to_do(sweep, place, share)
    _say_plan(sweep, share, jobs)
    refused = {refusal.job.key for refusal in sweep.refusals}
    ready = [job for job in jobs if job.key not in refused]
    if dry_run:
        _say_estimate(ready, engine, machines.workers, sweep.experiment.keeps_requests)
    elif machines.executor == "slurm" and jobs:
        how = (tuple(changes or ()), place, engine, machines.workers, machines.nodes, keep_going)
        shards = Shards(file, *how, tuple(registered()), tuple(sys.argv))
        options = _limited(options_of(machines.slurm or []), ready, machines, engine)
        with keeping(lambda: f"the jobs are cancelled, results in {place} are kept; run the same command to resume"):
            for line in run_shards(shards, options):
                say(line)
    else:
        gave_up = bool(jobs) and _run(sweep, jobs, place, engine, _starter(machines, engine))
        if checker:
            _check(checker, sweep, share, place, checks.every or 1)
        if gave_up:
            raise typer.Exit(1)
    if not dry_run:
        say(f"wrote {out}/part-*/")
        say(f"next: moereplay sweep show {typed(out)}")
        say(f"figures: moereplay plot {typed(out)}")


def _limited(options: dict[str, Any], jobs: list[Job], machines: Machines, engine: str) -> dict[str, Any]:
    """Return options of submitit with a time limit, and print one that comes from the estimate."""
    found = limited(options, lambda: estimate(jobs, engine, machines.workers * machines.nodes).seconds if jobs else 0)
    if found is not options:
        minutes = found["timeout_min"]
        say(
            f"time limit of a job: {minutes:,} min ({STARTING_MIN} and {TIMES} times the estimate of --dry-run); "
            f"another: --slurm timeout_min={minutes}"
        )
    return found


def _checker(checks: Checks, sweep: Sweep, share: list[Job], executor: str, out: str) -> Checker | None:
    """Return the checker of configurations, None without --every. Raises ConfigError if checks cannot run."""
    if checks.every is not None and executor == "slurm":
        raise ConfigError(
            "--every cannot be combined with --executor slurm: checks run on this machine; run them after the jobs"
        )
    if checks.every is not None and is_url(out):
        raise ConfigError(f"--every requires a folder, not --out {out}: checks are stored in a folder")
    return checker_of(checks, sweep.traces, (job.config.platform for job in share if job.kind == "configuration"))


def _check(checker: Checker, sweep: Sweep, share: list[Job], out: Place, every: int) -> None:
    """Check configurations that have a result, in their order."""
    jobs = [job for job in share if job.kind == "configuration"]
    without = {job.key for job in left_to_do(sweep, out, jobs)}
    ran = [job for job in jobs if job.key not in without]
    checked(checker, sweep.traces, out.local(), ran, lambda kept: kept.chosen(ran, every))


def _run(sweep: Sweep, jobs: list[Job], out: Place, engine: str, start: Start) -> bool:
    """Run the jobs. Return True if some were given up."""
    meter, kept = SweepMeter(), f"results in {out} are kept; run the same command to resume"
    with keeping(lambda: kept):
        derive(sweep, jobs)  # may take a minute; no replay has started yet
    with keeping(lambda: kept), interruptible() as stopping:
        try:
            progress = execute(sweep, jobs, out, engine, start, meter.update, stopping)
        finally:
            meter.close()
    _say_ending(progress)
    return bool(progress.given_up)


def _starter(machines: Machines, engine: str) -> Start:
    executor, workers = machines.executor, machines.workers
    if executor == "local":
        return lambda out, provenance: LocalExecutor(workers, engine == NOGIL, out, provenance)
    if executor == "ray":
        return lambda out, provenance: RayExecutor(machines.address, workers, out, provenance)
    raise ConfigError(f"unknown executor {executor!r}: {hint(executor, EXECUTORS)}")


def _say_plan(sweep: Sweep, share: list[Job], jobs: list[Job]) -> None:
    bounds = sum(job.kind == "bound" for job in share)
    traces = counted(len(sweep.traces), "trace")
    done = len(share) - len(jobs)
    say(
        f"{sweep.file.name}: {counted(len(share) - bounds, 'configuration')} and {counted(bounds, 'bound')} on {traces}"
        + (f", {done:,} already stored" if done else "")
    )
    for line in surpluses(sweep)[:MOST_NAMED]:
        say(f"warning: {line}")
    for line in notes(sweep)[:MOST_NAMED]:
        say(f"note: {line}")
    for job, reason in sweep.refusals[:MOST_NAMED]:
        say(f"invalid, stored as an error row: {job.name}: {reason}")


def _say_estimate(jobs: list[Job], engine: str, workers: int, requests: bool) -> None:
    if not jobs:
        return
    cost = estimate(jobs, engine, workers)
    print(f"replays      {len(jobs):,} to run, {cost.replay_seconds:.3g} s each (mean, from {cost.sampled} timed)")
    print(f"time         about {clock(cost.seconds)} with {min(workers, len(jobs))} workers, engine {engine}")
    if cost.process_bytes is not None:
        print(f"memory       about {cost.process_bytes / 2**20:,.0f} MiB per process")
    if requests:
        print(f"storage      about {size(cost.request_bytes)} for rows of requests (`requests = false` stores none)")


def _say_ending(progress: Progress) -> None:
    say_shared(progress.shared, progress.done, "jobs")
    errors = list(progress.errors.items())
    for (_, identity), reason in errors[:MOST_NAMED]:
        say(f"error row: {identity}: {reason}")
    for reason in progress.given_up.values():
        say(f"given up: {reason}")
    if len(errors) > MOST_NAMED:
        say(f"and {len(errors) - MOST_NAMED:,} more error rows; list them with `sweep show --errors`")
    if progress.stopped:
        say(f"stopped with {progress.done:,} of {progress.total:,} done; run the same command to resume")
        raise typer.Exit(INTERRUPTED)


# -- sweep merge


def sweep_merge(
    results: Annotated[list[str], typer.Argument(help="Folders or URLs of `sweep run`.", show_default=False)],
    out: Annotated[str, typer.Option(help="Folder or URL to write.", show_default=False)],
) -> None:
    """Join results: each configuration once, sorted. The bytes do not depend on how the runs were split."""
    merged = merge([place_of(each) for each in results], place_of(out))
    failed = f" and {merged.errors:,} error rows" if merged.errors else ""
    say(f"wrote {merged.where}: {merged.configurations:,} configurations{failed}")


# -- sweep schema


def sweep_schema() -> None:
    """Print the JSON Schema of experiment files, for completion and checks in editors."""
    show_json(json_schema())


# -- tune: search a space of configurations for its Pareto set


OBJECTIVES = "tpot_ms,mass_share_kept,gb_moved"  #: speed, fidelity and traffic


class Drawing(NamedTuple):
    """Choice of trials."""

    trials: Annotated[int, typer.Option(min=1, help="Total number of replays, including earlier runs.")] = 200
    sampler: Annotated[str, typer.Option(help="Sampler: tpe, nsgaii or random.")] = "tpe"
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler.")] = 0


@grouped
def tune(
    file: Annotated[Path, typer.Argument(help="Experiment file; its axes span the search space.", show_default=False)],
    *,
    out: Annotated[
        str, typer.Option(help="Folder for the journal and every replay; a rerun continues in it.")
    ] = "tune",
    objectives: Annotated[
        str,
        typer.Option(help="Comma list of metrics to optimise: tpot_ms, ttft_mean_ms, mass_share_kept, gb_moved, ..."),
    ] = OBJECTIVES,
    drawing: Drawing,
    changes: Changes = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of parallel replays.")] = CORES,
    engine: Annotated[str, typer.Option(help="compiled or reference (default: compiled).", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the Pareto set as JSON lines.")] = False,
    policy_file: PolicyFiles = None,
    checks: Checks,
) -> None:
    """Search an experiment for its Pareto set: configurations that no other beats in every objective. SIMULATED.

    With --every, the Pareto set and one of every N other trials are also measured, or run live.
    """
    if is_url(out):
        raise ConfigError(f"invalid --out {out}: expected a folder, for the journal of the search")
    engine = engine or ENGINES[0]
    experiment = read(file, changes or ())
    traces = open_traces(experiment.traces, file.parent, file)
    search = Search(experiment, file, traces, tuple(map(named, objectives.split(","))), *drawing, engine)
    check(search)
    checker = checker_of(checks, search.traces, platforms_of(search))  # of all that the search may draw
    folder = Folder(Path(out))
    folder.prepare()
    found = _search(search, folder, workers)
    say(f"wrote {out}/part-*/, every replay; run the same command with more --trials to continue")
    if checker:
        trials, front, every = tried(search, folder.path), jobs_found(search, found), checks.every or 1
        checked(checker, traces, folder.path, trials, lambda stored: stored.chosen_of_search(front, trials, every))
    _print_front(search, found, as_json)


def _search(search: Search, folder: Folder, workers: int) -> list[Found]:
    """Run or resume a search. An interrupt ends it after the running replays."""
    about = sweep_provenance(search.file.name, search.traces, search.engine, platforms(search.experiment))
    executor = LocalExecutor(workers, search.engine == NOGIL, folder, about)
    try:
        kept = f"finished replays are kept in {folder.path}; run the same command to resume"
        with keeping(lambda: kept), progress(search.trials, "trials") as advance, interruptible() as stopping:
            found = search_by(search, folder.path, executor, advance, stopping)
            if stopping():
                say(f"stopped: {kept}")
                raise typer.Exit(INTERRUPTED)
    finally:
        executor.close()
    return found


def _print_front(search: Search, found: Sequence[Found], as_json: bool) -> None:
    rows = [{**each.values, **each.settings} for each in found]
    rows.sort(key=lambda row: [-METRICS[name].score(row[name]) for name in search.objectives])
    if as_json:
        for row in rows:
            print(json_text(row))
        return
    routing = assumptions(synthetic(trace.header.provenance) for trace in search.traces)
    beaten = f"nothing tried beats in all of {', '.join(search.objectives)}"
    show(f"SIMULATED: {counted(len(rows), 'configuration')} that {beaten}", *routing, "", table(rows))
    knows, jobs = foresight(), jobs_found(search, found)
    if knowing := sum(knows(job.config.model_dump()) for job in jobs) // len(search.traces):
        show(f"with knowledge of the future: {knowing} of these; search without such policies for what can be used")
