"""What a sweep will cost, from a timed sample: the shortest, the middle and the longest of its replays."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from simulator.bounds import count
from simulator.replay import replay
from sweeps.batches import opened
from sweeps.jobs import Job


class Estimate(NamedTuple):
    """What a sweep will take, summed over its jobs."""

    sampled: int  #: replays that were timed
    replay_seconds: float  #: mean over all jobs
    seconds: float  #: of wall time on all workers
    process_bytes: int | None  #: most that this process held at once while sampling; None where nothing says so


def estimate(jobs: Sequence[Job], engine: str, workers: int) -> Estimate:
    """Replay, or count, a sample of `jobs`: one or more, all of which can run. Raises ConfigError or TraceError."""
    ordered = sorted(jobs, key=lambda job: job.work)
    sample = list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))
    _timed(sample[0], engine)  # derives arrays and compiles; not part of the rate
    rate = sum(_timed(job, engine) for job in sample) / sum(job.work for job in sample)
    total = rate * sum(job.work for job in jobs)
    return Estimate(len(sample), total / len(jobs), total / min(workers, len(jobs)), _peak())


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
