"""A sweep from its file to its parts: plan and check everything, leave out what is stored, run the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.results.parts import stored
from moereplay.simulator.capacity import surplus
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.remarks import adapted, without_effect
from moereplay.simulator.replay import check_engine, plan
from moereplay.sweeps.dispatch import Dispatcher, Standing
from moereplay.sweeps.executor import Executor
from moereplay.sweeps.experiment.expand import configurations
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.experiment.schema import Experiment
from moereplay.sweeps.jobs import Job, Refusal, jobs_of, open_traces
from moereplay.sweeps.limits import check_count
from moereplay.sweeps.provenance import sweep_provenance
from moereplay.sweeps.store import Place
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace

NOGIL = "compiled"  #: the engine whose replays run beside one another in one process
#: Makes an executor from the place for the parts and their provenance.
Start = Callable[[Place, Mapping[str, Any]], Executor]


class Sweep(NamedTuple):
    """An experiment file, read and checked, before anything is replayed."""

    file: Path
    experiment: Experiment
    traces: list[Trace]
    jobs: list[Job]
    refusals: list[Refusal]  #: configurations that will be error rows


def planned(file: Path, changes: Sequence[str] = (), keep_going: bool = False) -> Sweep:
    """Read and check an experiment. Raises ConfigError, PolicyError or TraceError naming the file.

    A configuration that cannot run on a trace is an error here, or, to keep going, an error row later.
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
    """A line for each capacity above everything that there is to cache on a trace."""
    traces, refused = {trace.digest: trace for trace in sweep.traces}, {refusal.job.key for refusal in sweep.refusals}
    above: dict[str, None] = {}
    asked = set()
    for job in sweep.jobs:
        what = (job.digest, job.config.capacity, job.config.scope, job.config.miss, job.config.prefetch)
        if job.kind == "bound" or job.key in refused or what in asked:
            continue
        asked.add(what)
        ready = plan(traces[job.digest], job.config)
        if said := surplus(ready.capacity, ready.layout.geometry, ready.layout.tiers):
            above[f"capacity {job.config.capacity}: {said}"] = None
    return list(above)


def notes(sweep: Sweep) -> list[str]:
    """A line for each setting that changes nothing on a trace, and for default bits above what a trace stores."""
    refused = {refusal.job.key for refusal in sweep.refusals}
    found: dict[str, None] = {}
    for trace in sweep.traces:
        jobs = [job for job in sweep.jobs if job.kind != "bound" and job.digest == trace.digest]
        configs = [job.config for job in jobs if job.key not in refused]
        found |= dict.fromkeys([*adapted(trace, configs), *without_effect(trace, configs)])
    return list(found)


def left_to_do(sweep: Sweep, out: Place, jobs: Iterable[Job]) -> list[Job]:
    """Jobs without a result in `out`. Raises ConfigError if its parts cannot be read."""
    done = stored(out.provenances(), sweep.experiment.requests is True)
    return [job for job in jobs if job.key not in done]


def derive(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """The demand of the jobs' traces, once, so that workers only map it. Raises TraceError."""
    for trace in sweep.traces:
        for passes in {job.config.passes for job in jobs if job.digest == trace.digest}:
            demand_of(trace, passes)


def execute(
    sweep: Sweep,
    jobs: Sequence[Job],
    out: Place,
    engine: str,
    start: Start,
    watch: Callable[[Standing], None] = lambda standing: None,
    stopping: Callable[[], bool] = lambda: False,
    command: Sequence[str] | None = None,
) -> Standing:
    """Run jobs on an executor, which is closed whatever happens. Raises ConfigError if parts cannot be written.

    `command` is the command line that asked for it, if it is not that of this process.
    """
    check_engine(engine)
    if not jobs:
        return Standing(0)
    out.prepare()
    derive(sweep, jobs)
    machines = {job.config.platform for job in jobs if job.kind == "configuration"}
    executor = start(out, sweep_provenance(sweep.file.name, sweep.traces, engine, machines, command))
    try:
        return Dispatcher(jobs, executor, engine, sweep.experiment.keeps_requests).run(watch, stopping)
    finally:
        executor.close()
