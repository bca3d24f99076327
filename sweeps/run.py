"""Run a sweep: plan and check everything, skip stored results, dispatch the rest; or estimate its cost."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from moereplay.policies import files
from moereplay.results.parts import stored
from moereplay.results.result import METRICS
from moereplay.simulator.bounds import adapted, without_effect
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import check_engine, plan
from moereplay.sweeps.experiment.expand import configurations
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.experiment.schema import Experiment
from moereplay.sweeps.grid import check_count, derived, prefetches
from moereplay.sweeps.jobs import (
    Batch,
    Computed,
    Headline,
    Job,
    Refusal,
    compute,
    in_groups,
    jobs_of,
    open_traces,
    to_parquet,
)
from moereplay.sweeps.parts import sweep_provenance
from moereplay.sweeps.store import Place
from moereplay.traces.files import leaving_no_folders
from moereplay.traces.schema import Trace

NOGIL = "compiled"  #: engine whose replays release the GIL and run in threads
#: Start an executor, given the place for the parts and their provenance.
Start = Callable[[Place, Mapping[str, Any]], "Executor"]


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
    everything = len(configs) * len(traces)
    advice = "name fewer of either, or divide them between experiments"
    check_count(everything, f"{file}: its grid on {len(traces)} traces makes", advice)
    jobs, refusals = jobs_of(traces, configs, experiment.bounds)
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
    done = stored(out.provenances(), *sweep.experiment.wanted)
    return [job for job in jobs if job.key not in done]


def derive(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """Derive the demand of the jobs' traces once, so that workers only map it. Raises TraceError."""
    for trace in sweep.traces:
        derived(trace, [job.config for job in jobs if job.digest == trace.digest])


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
    with leaving_no_folders(out.beside(sweep.file.parent)):
        out.prepare()
        derive(sweep, jobs)
        machines = {job.config.platform for job in jobs if job.kind == "configuration"}
        executor = start(out, sweep_provenance(sweep.file.name, sweep.traces, engine, machines, command))
        try:
            kept = sweep.experiment.keeps_requests, sweep.experiment.request_layers
            return Dispatcher(jobs, executor, engine, *kept).run(watch, stopping)
        finally:
            executor.close()


# -- Dispatch: longest first, in batches of a few seconds; what ran when a worker died runs once more, alone

#: A kill costs at most a batch: a few seconds, or a hundredth of a long sweep; larger batches keep parts few.
LEAST_SECONDS, MOST_SECONDS, SHARE = 3.0, 60.0, 0.01
MOST_JOBS = 64
BATCHES_PER_SLOT = 3  #: below it batches shrink, so that all slots end together


@dataclass
class Progress:
    """Progress of a sweep. `best` has each figure's best value without the future, with the job's identity."""

    total: int
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    shared: int = 0  #: jobs that took over the decisions of another
    errors: dict[tuple[str, str], str] = field(default_factory=dict)  #: jobs that became error rows
    given_up: dict[tuple[str, str], str] = field(default_factory=dict)  #: jobs that were given up, with the reason
    stopped: bool = False
    best: dict[str, tuple[float, str]] = field(default_factory=dict)
    figures: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  #: of every job that has a result

    @property
    def per_second(self) -> float:
        """Replays per second since the start."""
        return self.done / max(time.monotonic() - self.started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end; None before the first job."""
        return (self.total - self.done) / self.per_second if self.done else None

    def count(self, headline: Headline) -> None:
        """Count a finished job, and its error or its figures."""
        self.done += 1
        self.shared += headline.shared
        kind, identity = headline.key
        if headline.error:
            self.errors[headline.key] = headline.error
            return
        self.figures[headline.key] = headline.figures
        for figure, value in headline.figures.items() if kind == "configuration" and not headline.foresees else ():
            score = METRICS[figure].score
            if figure not in self.best or score(value) > score(self.best[figure][0]):
                self.best[figure] = value, identity


class Dispatcher:
    """Driver that hands jobs to an executor until all are stored or given up, or a stop is requested."""

    def __init__(
        self, jobs: Iterable[Job], executor: Executor, engine: str, requests: bool, by_layer: bool = False
    ) -> None:
        longest_first = sorted(jobs, key=lambda job: -job.work)  # stable: ties in the given order
        self._queue = deque(job for group in in_groups(longest_first) for job in group)
        self._suspects: deque[Job] = deque()  # were running when a worker died; they run one at a time
        self._struck: set[tuple[str, str]] = set()
        self._executor, self._engine, self._requests, self._by_layer = executor, engine, requests, by_layer
        self._running: dict[int, Batch] = {}
        self._numbers = 0
        self._seconds, self._work = 0.0, 0  # of finished jobs
        self._unwritable: str | None = None  # why a part could not be stored
        self.progress = Progress(len(self._queue))

    def run(self, watch: Callable[[Progress], None], stopping: Callable[[], bool]) -> Progress:
        """Run all jobs; call `watch` at every change and about once a second.

        Raises ConfigError if a part cannot be written, after the other batches in flight have ended.
        """
        while self._running or (self._left and not self._ends(stopping)):
            if not self._ends(stopping):
                self._hand_out()
            for event in self._executor.collect(1.0):
                self._apply(event)
            watch(self.progress)
        if self._unwritable:
            raise ConfigError(self._unwritable)
        self.progress.stopped = bool(self._left)
        return self.progress

    @property
    def _left(self) -> int:
        return len(self._queue) + len(self._suspects)

    def _ends(self, stopping: Callable[[], bool]) -> bool:
        return self._unwritable is not None or stopping()

    def _hand_out(self) -> None:
        while self._suspects and not self._alone():
            self._submit([self._suspects.popleft()], alone=True)
        while self._queue and self._executor.room > 0:
            self._submit(self._next_jobs(), alone=False)

    def _alone(self) -> bool:
        """Return whether a suspect is running: at most one process beyond the requested workers."""
        return any(job.key in self._struck for batch in self._running.values() for job in batch.jobs)

    def _submit(self, jobs: list[Job], alone: bool) -> None:
        own = tuple(files.registered())
        batch = Batch(self._numbers, tuple(jobs), self._engine, self._requests, own, self._by_layer)
        self._numbers += 1
        self._running[batch.number] = batch
        self._executor.submit(batch, alone)

    def _next_jobs(self) -> list[Job]:
        """Take the jobs of a batch from the front of the queue."""
        most = min(MOST_JOBS, max(1, len(self._queue) // (BATCHES_PER_SLOT * self._executor.slots)))
        target = self._work_of(self._target_seconds())
        jobs = [self._queue.popleft()]
        work = jobs[0].work
        while self._queue and self._fits_in(jobs, work, most, target):
            work += self._queue[0].work
            jobs.append(self._queue.popleft())
        return jobs

    def _fits_in(self, jobs: list[Job], work: float, most: int, target: float) -> bool:
        """Return whether the next job joins: those that may share do, or with prefetch if slots are left for others."""
        following, busy = self._queue[0], len(self._queue) >= self._executor.slots
        if following.shares and following.shares == jobs[-1].shares and (busy or not prefetches(following.config)):
            return len(jobs) < MOST_JOBS
        return len(jobs) < most and work + following.work <= target

    def _target_seconds(self) -> float:
        elapsed = time.monotonic() - self.progress.started
        return min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * elapsed))

    def _work_of(self, seconds: float) -> float:
        """Convert seconds to units of work; 0 before the first result, so that first batches hold one job."""
        return seconds * self._work / self._seconds if self._seconds else 0.0

    def _apply(self, event: Event) -> None:
        batch = self._running.pop(event.batch.number)
        if isinstance(event, Unwritable):
            self._unwritable = self._unwritable or event.reason
            return
        if isinstance(event, Stored):
            for job, headline in zip(batch.jobs, event.headlines, strict=True):
                self._seconds, self._work = self._seconds + headline.seconds, self._work + job.work
                self.progress.count(headline)
            return
        self._resubmit(event)

    def _resubmit(self, lost: Lost) -> None:
        """Requeue the jobs of a lost batch; a suspect runs once more, alone, and is given up after a second death."""
        for job in lost.batch.jobs:
            if job not in lost.suspects:
                self._queue.appendleft(job)
            elif job.key not in self._struck:
                self._struck.add(job.key)
                self._suspects.append(job)
            else:
                self.progress.done += 1
                self.progress.given_up[job.key] = f"{job.name}: its worker ended twice ({lost.reason})"


# -- Events and the interface of executors


@dataclass(frozen=True)
class Stored:
    """A batch whose part is stored."""

    batch: Batch
    headlines: Sequence[Headline]


@dataclass(frozen=True)
class Lost:
    """A batch whose worker died before anything was stored."""

    batch: Batch
    suspects: tuple[Job, ...]  #: jobs that may have killed it: the one in progress, or all if unknown
    reason: str


@dataclass(frozen=True)
class Unwritable:
    """A batch that was replayed and could not be stored: the disk is full, or the bucket out of reach."""

    batch: Batch
    reason: str


Event = Stored | Lost | Unwritable


class Executor(Protocol):
    """Interface of what runs batches. Order, retries and progress are the dispatcher's."""

    slots: int  #: batches that run at once

    @property
    def room(self) -> int:
        """Number of batches that would start now."""
        ...

    def submit(self, batch: Batch, alone: bool = False) -> None:
        """Run a batch, in a process without other batches if `alone`."""
        ...

    def collect(self, seconds: float) -> Sequence[Event]:
        """Return events, waiting at most `seconds` for the first."""
        ...

    def close(self) -> None:
        """Release all resources, even of running batches."""
        ...


# -- Cost from a timed sample

SAMPLES = 5  #: groups of jobs that an estimate replays


class Estimate(NamedTuple):
    """Estimated cost of a sweep."""

    sampled: int  #: groups of jobs that were timed
    replay_seconds: float  #: mean over all jobs
    seconds: float  #: wall time on all workers
    process_bytes: int | None  #: peak memory of this process while sampling; None if unknown
    request_bytes: float  #: request rows of all jobs on disk


def estimate(jobs: Sequence[Job], engine: str, workers: int) -> Estimate:
    """Estimate the cost of one or more runnable jobs from groups that are evenly spaced by work, each replayed twice.

    The first replay compiles and derives arrays, which a sweep does once, so the second one counts. A group's work is
    that of its first job, whose decisions the others take over. Raises ConfigError or TraceError.
    """
    groups = sorted(in_groups(jobs), key=lambda group: group[0].work)
    many = min(SAMPLES, len(groups))
    sample = [groups[(2 * at + 1) * len(groups) // (2 * many)] for at in range(many)]
    for group in sample:
        _computed(group, engine)
    parts = [_computed(group, engine) for group in sample]
    took = sum(headline.seconds for part in parts for headline in part.headlines)
    total = took / sum(group[0].work for group in sample) * sum(group[0].work for group in groups)
    seconds = total / min(workers, len(groups))
    count = min(len(groups), min(workers, len(groups)) * (2 * BATCHES_PER_SLOT + seconds / LEAST_SECONDS))
    return Estimate(many, total / len(jobs), seconds, _peak(), _request_bytes(jobs, parts, count))


def _computed(group: Sequence[Job], engine: str) -> Computed:
    """Replay a group as a worker does. Raises ConfigError if one of it fails."""
    found = compute(Batch(0, tuple(group), engine, True))
    for error in filter(None, (headline.error for headline in found.headlines)):
        raise ConfigError(error)
    return found


def _request_bytes(jobs: Sequence[Job], parts: Sequence[Computed], count: float) -> float:
    """Estimate the bytes of request rows: a fixed cost for each of `count` parts and the rows of configurations."""
    files = [part.part.files.get(name) for part in parts for name in ("requests", "request_layers")]
    configurations = sum(headline.key[0] == "configuration" for part in parts for headline in part.headlines)
    beside = len(to_parquet("requests", []))
    rows = sum(len(file) - beside for file in files if file)
    return beside * count + rows / configurations * sum(job.counted is None for job in jobs) if rows else 0.0


def _peak() -> int | None:
    if sys.platform == "win32":
        return None
    resource = import_module("resource")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
