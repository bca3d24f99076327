"""What a sweep will cost, from a timed sample: the shortest, the middle and the longest of its replays."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from moereplay.simulator.bounds import count
from moereplay.simulator.replay import replay
from moereplay.sweeps.batches import opened
from moereplay.sweeps.dispatch import BATCHES_PER_SLOT, LEAST_SECONDS
from moereplay.sweeps.jobs import Job
from moereplay.sweeps.tables import rows_of, to_parquet


class Estimate(NamedTuple):
    """What a sweep will take, summed over its jobs."""

    sampled: int  #: replays that were timed
    replay_seconds: float  #: mean over all jobs
    seconds: float  #: of wall time on all workers
    process_bytes: int | None  #: most that this process held at once while sampling; None where nothing says so
    request_bytes: float  #: that rows of requests take on disk, for all jobs


def estimate(jobs: Sequence[Job], engine: str, workers: int) -> Estimate:
    """Replay, or count, a sample of `jobs`: one or more, all of which can run. Raises ConfigError or TraceError."""
    ordered = sorted(jobs, key=lambda job: job.work)
    sample = list(dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]]))
    _timed(sample[0], engine)  # derives arrays and compiles; not part of the rate
    rate = sum(_timed(job, engine) for job in sample) / sum(job.work for job in sample)
    total = rate * sum(job.work for job in jobs)
    seconds = total / min(workers, len(jobs))
    parts = min(len(jobs), min(workers, len(jobs)) * (2 * BATCHES_PER_SLOT + seconds / LEAST_SECONDS))
    return Estimate(len(sample), total / len(jobs), seconds, _peak(), _stored(ordered, engine, parts))


def _stored(jobs: Sequence[Job], engine: str, parts: float) -> float:
    """Bytes of the rows of requests: what each part's file has beside its rows, and those of every configuration."""
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
