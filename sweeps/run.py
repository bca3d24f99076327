"""Run a sweep: plan and check everything, skip stored results, run the rest; or estimate its cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.results.parts import stored
from moereplay.simulator.bounds import count
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.remarks import adapted, without_effect
from moereplay.simulator.replay import check_engine, plan, replay
from moereplay.sweeps.batches import opened, rows_of, to_parquet
from moereplay.sweeps.dispatch import BATCHES_PER_SLOT, LEAST_SECONDS, Dispatcher, Executor, Progress
from moereplay.sweeps.experiment.expand import configurations
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.experiment.schema import Experiment
from moereplay.sweeps.grid import check_count
from moereplay.sweeps.jobs import Job, Refusal, jobs_of, open_traces
from moereplay.sweeps.parts import sweep_provenance
from moereplay.sweeps.store import Place
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace

NOGIL = "compiled"  #: engine whose replays release the GIL and run in threads
#: Start an executor, given the place for the parts and their provenance.
Start = Callable[[Place, Mapping[str, Any]], Executor]


class Sweep(NamedTuple):
    """A checked experiment before its first replay."""

    file: Path
    experiment: Experiment
    traces: list[Trace]
    jobs: list[Job]
    refusals: list[Refusal]  #: configurations that will be error rows


def planned(file: Path, changes: Sequence[str] = (), keep_going: bool = False) -> Sweep:
    """Read and check an experiment. Raises ConfigError, PolicyError or TraceError naming the file.

    A configuration that cannot run on a trace is an error here, or with `keep_going` an error row later.
    """
    experiment = read(file, changes)
    configs = configurations(experiment, file)
    traces = open_traces(experiment.traces, file.parent, file)
    advice = "name fewer of either, or divide them between experiments"
    check_count(len(configs) * len(traces), f"{file}: its grid on {len(traces)} traces makes", advice)
    jobs, refusals = jobs_of(traces, configs, experiment.bounds)
    everything = len(configs) * len(traces)
    if refusals and (not keep_going or len(refusals) == everything):
        job, reason = refusals[0]
        advice = "" if keep_going else "; [[exclude]] such combinations, or let --keep-going make them error rows"
        raise ConfigError(f"{file}: {len(refusals)} of {everything} cannot run, first {job.name}: {reason}{advice}")
    return Sweep(file, experiment, traces, jobs, refusals)


def surpluses(sweep: Sweep) -> list[str]:
    """Return a line for each capacity that exceeds all experts of a trace."""
    traces, refused = {trace.digest: trace for trace in sweep.traces}, {refusal.job.key for refusal in sweep.refusals}
    above: dict[str, None] = {}
    asked = set()
    for job in sweep.jobs:
        what = (job.digest, job.config.capacity, job.config.scope, job.config.miss, job.config.prefetch)
        what += (job.config.platform,) if job.config.scope == "per_link" else ()
        if job.kind == "bound" or job.key in refused or what in asked:
            continue
        asked.add(what)
        ready = plan(traces[job.digest], job.config)
        if line := ready.surplus:
            above[f"capacity {job.config.capacity}: {line}"] = None
    return list(above)


def notes(sweep: Sweep) -> list[str]:
    """Return a line for each setting without effect on a trace, and for default bits above the stored precision."""
    refused = {refusal.job.key for refusal in sweep.refusals}
    found: dict[str, None] = {}
    for trace in sweep.traces:
        jobs = [job for job in sweep.jobs if job.kind != "bound" and job.digest == trace.digest]
        configs = [job.config for job in jobs if job.key not in refused]
        found |= dict.fromkeys([*adapted(trace, configs), *without_effect(trace, configs)])
    return list(found)


def left_to_do(sweep: Sweep, out: Place, jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs without a result in `out`. Raises ConfigError if its parts cannot be read."""
    done = stored(out.provenances(), sweep.experiment.requests is True)
    return [job for job in jobs if job.key not in done]


def derive(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """Derive the demand of the jobs' traces once, so that workers only map it. Raises TraceError."""
    for trace in sweep.traces:
        of_trace = (job.config for job in jobs if job.digest == trace.digest)
        for passes in {config.schedule for config in of_trace if not config.arrive}:
            demand_of(trace, passes)


def execute(
    sweep: Sweep,
    jobs: Sequence[Job],
    out: Place,
    engine: str,
    start: Start,
    watch: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
    command: Sequence[str] | None = None,
) -> Progress:
    """Run jobs on an executor, and always close it. Raises ConfigError if parts cannot be written.

    `command` is the command line to record, by default that of this process.
    """
    check_engine(engine)
    if not jobs:
        return Progress(0)
    out.prepare()
    derive(sweep, jobs)
    machines = {job.config.platform for job in jobs if job.kind == "configuration"}
    executor = start(out, sweep_provenance(sweep.file.name, sweep.traces, engine, machines, command))
    try:
        return Dispatcher(jobs, executor, engine, sweep.experiment.keeps_requests).run(watch, stopping)
    finally:
        executor.close()


# -- Cost from a timed sample


class Estimate(NamedTuple):
    """Estimated cost of a sweep."""

    sampled: int  #: timed replays
    replay_seconds: float  #: mean over all jobs
    seconds: float  #: wall time on all workers
    process_bytes: int | None  #: peak memory of this process while sampling; None if unknown
    request_bytes: float  #: request rows of all jobs on disk


def estimate(jobs: Sequence[Job], engine: str, workers: int) -> Estimate:
    """Estimate the cost of one or more runnable jobs from the shortest, the middle and the longest of them.

    Raises ConfigError or TraceError."""
    ordered = sorted(jobs, key=lambda job: job.work)
    sample = list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))
    _timed(sample[0], engine)  # excludes derived arrays and compilation from the rate
    rate = sum(_timed(job, engine) for job in sample) / sum(job.work for job in sample)
    total = rate * sum(job.work for job in jobs)
    seconds = total / min(workers, len(jobs))
    parts = min(len(jobs), min(workers, len(jobs)) * (2 * BATCHES_PER_SLOT + seconds / LEAST_SECONDS))
    return Estimate(len(sample), total / len(jobs), seconds, _peak(), _stored(ordered, engine, parts))


def _stored(jobs: Sequence[Job], engine: str, parts: float) -> float:
    """Estimate the bytes of request rows: a fixed cost per part and the rows of every configuration."""
    configurations = [job for job in jobs if job.counted is None]
    if not configurations:
        return 0.0
    sample = list(dict.fromkeys([configurations[0], configurations[len(configurations) // 2], configurations[-1]]))
    results = [replay(opened(job.trace, job.digest), job.config, engine=engine) for job in sample]
    rows = [rows_of(job, result, None, True)["requests"] for job, result in zip(sample, results, strict=True)]
    beside, every = (len(to_parquet("requests", each)) for each in ([], [row for each in rows for row in each]))
    return beside * parts + (every - beside) / len(sample) * len(configurations)


def _peak() -> int | None:
    if sys.platform == "win32":
        return None
    resource = import_module("resource")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _timed(job: Job, engine: str) -> float:
    start, trace = time.perf_counter(), opened(job.trace, job.digest)
    if job.counted is not None:
        count(trace, job.counted)
    else:
        replay(trace, job.config, engine=engine)
    return time.perf_counter() - start
