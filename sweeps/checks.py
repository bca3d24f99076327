"""Check a sweep: measure one of every N configurations, or run it live, and compare with a replay of the same tokens.

A `Checker` runs configurations: `tracegen.live.checks` measures transfers, `tracegen.live.checks` runs the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from moereplay.results import checks as stored
from moereplay.results.checks import Check, How, Side, path_of
from moereplay.simulator.config import ReplayConfig
from moereplay.sweeps.jobs import Job, Refusal
from moereplay.traces.schema import Trace

#: Runs a configuration, and replays the same tokens: (checked, replayed).
Run = Callable[[ReplayConfig], tuple[Side, Side]]


class Checker(Protocol):
    """Interface of a way to check configurations."""

    def how(self, trace: Trace) -> How:
        """Return the way and the amount of this trace. Raises ConfigError if the trace is shorter."""
        ...

    def refusal(self, trace: Trace, config: ReplayConfig) -> str | None:
        """Return why this configuration cannot be checked; None if it can."""
        ...

    def opened(self, trace: Trace, configs: Sequence[ReplayConfig]) -> AbstractContextManager[Run]:
        """Open a runner for these configurations in turn. Raises ConfigError if this machine cannot run them."""
        ...


class Chosen(NamedTuple):
    """Jobs to check, and those that were passed over because they cannot be checked."""

    jobs: list[Job]
    skipped: list[Refusal]


def chosen(jobs: Sequence[Job], every: int, refusal: Callable[[Job], str | None]) -> Chosen:
    """Choose one of every `every` jobs, so that each value of each axis is checked in proportion to its jobs.

    Open-loop sets come first, because their error is the least known. The next job is the one whose values are checked
    too rarely so far; the hash of its identity breaks ties. A smaller `every` adds jobs and drops none.
    """
    left = sorted(jobs, key=lambda job: hashlib.sha256(job.identity.encode()).digest())
    draw = _Draw(left)
    found: list[Job] = []
    skipped: list[Refusal] = []
    while len(found) * every < len(jobs) and (at := draw.next()) is not None:
        reason = refusal(left[at])
        if reason is None:
            found.append(left[at])
        else:
            skipped.append(Refusal(left[at], reason))
        draw.take(at, reason is None)
    return Chosen(found, skipped)


class _Draw:
    """Draw jobs one by one, balanced over their axes."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._open = np.array([job.config.policy_set().open_loop for job in jobs], bool)
        values = [
            [*(str(getattr(job.config, name)) for name in type(job.config).model_fields), job.digest, str(is_open)]
            for job, is_open in zip(jobs, self._open, strict=True)
        ]
        axes = [axis for axis in zip(*values, strict=True) if len(set(axis)) > 1]
        self._codes = [np.unique(np.array(axis), return_inverse=True)[1] for axis in axes]  #: per axis, (jobs,)
        self._shares = [np.bincount(codes) for codes in self._codes]  #: per axis, jobs of each value
        self._counts = [np.zeros_like(shares) for shares in self._shares]  #: of those, checked
        self._left, self._checked = np.ones(len(jobs), bool), 0

    def next(self) -> int | None:
        """Return the job whose values are furthest below their share; None if none is left."""
        among = self._left
        if not self._checked and (among & self._open).any():
            among = among & self._open
        if not among.any():
            return None
        lacking = np.zeros(len(self._left), np.int64)
        for codes, shares, counts in zip(self._codes, self._shares, self._counts, strict=True):
            lacking += (shares * (self._checked + 1) - counts * len(self._left))[codes]
        return int(np.where(among, lacking, np.iinfo(np.int64).min).argmax())

    def take(self, at: int, is_checked: bool) -> None:
        """Remove a job from the draw; a checked one counts towards the share of its values."""
        self._left[at] = False
        if is_checked:
            self._checked += 1
            for codes, counts in zip(self._codes, self._counts, strict=True):
                counts[codes[at]] += 1


class Checks:
    """Checks of one sweep: chooses configurations, runs them and stores the results."""

    def __init__(self, checker: Checker, traces: Sequence[Trace], folder: Path) -> None:
        self._checker, self._folder = checker, folder
        self._traces: Mapping[str, Trace] = {trace.digest: trace for trace in traces}
        self._how = {digest: checker.how(trace) for digest, trace in self._traces.items()}

    def chosen(self, jobs: Sequence[Job], every: int) -> Chosen:
        """Choose as the function `chosen` does; jobs with a stored check are always eligible."""
        return chosen(jobs, every, self._refusal)

    def chosen_of_search(self, front: Sequence[Job], others: Sequence[Job], every: int) -> Chosen:
        """Choose all of a Pareto set that can be checked, and one of every `every` other trials."""
        best, rest = self.chosen(front, 1), self.chosen([job for job in others if job not in front], every)
        return Chosen([*best.jobs, *rest.jobs], [*best.skipped, *rest.skipped])

    def run(
        self,
        jobs: Sequence[Job],
        done: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Check jobs one at a time, trace by trace, and store each result. Raises ConfigError or ResultError."""
        for digest, trace in self._traces.items():
            own = [job for job in self.left(jobs) if job.digest == digest]
            if not own or stopping():
                continue
            with self._checker.opened(trace, [job.config for job in own]) as run:
                for job in own:
                    if stopping():
                        return
                    load = os.getloadavg()[0]
                    self._keep(job, load, *run(job.config))
                    done()

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs without a stored check."""
        return [job for job in jobs if not self._is_kept(job)]

    def found(self, jobs: Sequence[Job]) -> list[Check]:
        """Return every stored check of these jobs, whichever way it was made."""
        wanted = {job.identity for job in jobs}
        return [check for check in stored.load(self._folder) if check.identity in wanted]

    def _refusal(self, job: Job) -> str | None:
        return None if self._is_kept(job) else self._checker.refusal(self._traces[job.digest], job.config)

    def _is_kept(self, job: Job) -> bool:
        return path_of(self._folder, job.identity, self._how[job.digest]).exists()

    def _keep(self, job: Job, load: float, checked: Side, replayed: Side) -> None:
        config = job.config.model_dump(mode="json")
        how = self._how[job.digest]
        about = {"identity": job.identity, "trace": job.digest, "config": config, "how": how, "load": load}
        stored.write(self._folder, Check.model_validate(about | {"checked": checked, "replayed": replayed}))
