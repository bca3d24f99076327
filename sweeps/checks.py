"""Checks of a sweep: of every N configurations one is measured, or run live, beside a replay of the same tokens.

What runs is a `Checker`: `tracegen.offload.checks` measures, `tracegen.live.checks` runs the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from results import checks as stored
from results.checks import Check, How, Side, path_of
from simulator.config import ReplayConfig
from sweeps.jobs import Job, Refusal
from traces.schema import Trace

#: Runs a configuration, and replays the same tokens: (checked, replayed).
Run = Callable[[ReplayConfig], tuple[Side, Side]]


class Checker(Protocol):
    """A way to check configurations."""

    def how(self, trace: Trace) -> How:
        """In which way, and on how much of this trace. Raises ConfigError where the trace has less."""
        ...

    def refusal(self, trace: Trace, config: ReplayConfig) -> str | None:
        """Why this configuration cannot be checked; None if it can."""
        ...

    def opened(self, trace: Trace, configs: Sequence[ReplayConfig]) -> AbstractContextManager[Run]:
        """What runs these configurations, one after the other. Raises ConfigError where this machine cannot."""
        ...


class Chosen(NamedTuple):
    """What is checked, and the configurations before it that cannot be."""

    jobs: list[Job]
    skipped: list[Refusal]


def chosen(jobs: Sequence[Job], every: int, refusal: Callable[[Job], str | None]) -> Chosen:
    """Of every `every` jobs in turn, the first that can be checked; where none can, none."""
    found: list[Job] = []
    skipped: list[Refusal] = []
    for begin in range(0, len(jobs), every):
        for job in jobs[begin : begin + every]:
            reason = refusal(job)
            if reason is None:
                found.append(job)
                break
            skipped.append(Refusal(job, reason))
    return Chosen(found, skipped)


class Checks:
    """The checks of one sweep: which of its configurations, and where they are kept."""

    def __init__(self, checker: Checker, traces: Sequence[Trace], folder: Path) -> None:
        self._checker, self._folder = checker, folder
        self._traces: Mapping[str, Trace] = {trace.digest: trace for trace in traces}
        self._how = {digest: checker.how(trace) for digest, trace in self._traces.items()}

    def chosen(self, jobs: Sequence[Job], every: int) -> Chosen:
        """As `chosen`; what is checked already can be."""
        return chosen(jobs, every, self._refusal)

    def chosen_of_search(self, front: Sequence[Job], others: Sequence[Job], every: int) -> Chosen:
        """All of a Pareto set that can be checked, and of the other trials as `chosen`."""
        best, rest = self.chosen(front, 1), self.chosen([job for job in others if job not in front], every)
        return Chosen([*best.jobs, *rest.jobs], [*best.skipped, *rest.skipped])

    def run(
        self,
        jobs: Sequence[Job],
        done: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """One at a time, trace by trace; each is kept when it is complete. Raises ConfigError or ResultError."""
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
        """Those that are not checked yet."""
        return [job for job in jobs if not self._is_kept(job)]

    def found(self, jobs: Sequence[Job]) -> list[Check]:
        """Every check of these jobs that is kept, in whatever way it was made."""
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
