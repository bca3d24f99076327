"""Replay a batch, the jobs that one worker runs in turn, into one part."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.results import parts
from moereplay.results.metrics import searched
from moereplay.results.parts import Part, Rows, key
from moereplay.results.result import Result, Row
from moereplay.results.schema import table_schemas
from moereplay.results.settings import setting_kinds
from moereplay.simulator.bounds import Counted, count
from moereplay.simulator.config import KINDS, SEMANTICS_VERSION
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import Sharing
from moereplay.simulator.replay import replay
from moereplay.sweeps.jobs import Job
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.store import open_trace


@dataclass(frozen=True)
class Batch:
    """Jobs for one worker, and how to replay them."""

    number: int
    jobs: tuple[Job, ...]
    engine: str
    requests: bool
    policies: tuple[
        tuple[str, bytes], ...
    ] = ()  #: files of the user's own, as `policies.files.registered` returns them


class Headline(NamedTuple):
    """Summary of a finished job for the driver."""

    key: tuple[str, str]
    seconds: float
    error: str | None
    figures: dict[str, float]
    shared: bool = False  #: whether it took over the decisions of another job


class Computed(NamedTuple):
    """Result of a batch."""

    part: Part
    headlines: list[Headline]


def compute(batch: Batch, began: Callable[[int], None] = lambda position: None) -> Computed:
    """Replay a batch. A job that fails becomes an error row; `began` gets the position of each job as it starts."""
    tables: Rows = {}
    headlines = []
    often, sharing = Counter(job.shares for job in batch.jobs), Sharing()
    for position, job in enumerate(batch.jobs):
        began(position)
        start, before = time.perf_counter(), sharing.taken
        result, error = _attempt(job, batch, sharing if job.shares and often[job.shares] > 1 else None)
        for table, rows in rows_of(job, result, error, batch.requests).items():
            tables.setdefault(table, []).extend(rows)
        headline = _headline(job, time.perf_counter() - start, result, error)
        headlines.append(headline._replace(shared=sharing.taken > before))
    files = {table: to_parquet(table, rows) for table, rows in tables.items() if rows}
    return Computed(Part(files, _holds(batch, headlines)), headlines)


def _attempt(job: Job, batch: Batch, sharing: Sharing | None) -> tuple[Result | Counted | None, str | None]:
    try:
        files.register_all(batch.policies)
        trace = opened(job.trace, job.digest)
        if job.counted:
            return count(trace, job.counted), None
        return replay(trace, job.config, engine=batch.engine, sharing=sharing), None
    except (ConfigError, PolicyError, TraceError) as error:
        return None, str(error)
    except Exception as error:  # one bad configuration must not end the sweep
        return None, files.blamed(error) or f"unexpected {type(error).__name__}: {error}"


_traces: dict[str, Trace] = {}
_opening = threading.Lock()


def opened(path: Path, digest: str) -> Trace:
    """Return a trace, opened once per process. Raises TraceError if it changed after the sweep was planned."""
    with _opening:
        if digest not in _traces:
            trace = open_trace(path)
            if trace.digest != digest:
                raise TraceError(f"{path} has changed since the sweep began; run the sweep again")
            _traces[digest] = trace
        return _traces[digest]


def _holds(batch: Batch, headlines: list[Headline]) -> dict[str, list[str]]:
    """Group identities by the kind of rows in the part; a failed job counts as an error, not as a result."""
    holds: dict[str, list[str]] = {}
    for (kind, identity), _, error, *_ in headlines:
        holds.setdefault("error" if error else kind, []).append(identity)
    if batch.requests and "configuration" in holds:
        holds["requests"] = holds["configuration"]
    return {what: sorted(identities) for what, identities in holds.items()}


def _headline(job: Job, seconds: float, result: Result | Counted | None, error: str | None) -> Headline:
    return Headline(job.key, seconds, error, searched(result) if isinstance(result, Result) else {})


# -- Rows of a part: of a result, a count or an error

TABLES = table_schemas(setting_kinds(), KINDS)


def rows_of(job: Job, result: Result | Counted | None, error: str | None, requests: bool) -> Rows:
    """Return the rows that one job adds to each table."""
    if job.kind == "bound":
        return {"bounds": [] if result is None else [key(job.identity) | dict(cast(Counted, result))]}
    if not isinstance(result, Result):
        settings = job.config.model_dump(mode="json") | {"trace": job.digest, "semantics": SEMANTICS_VERSION}
        return {"configurations": [key(job.identity) | {"bound": job.bound, "error": error} | settings]}
    return parts.rows_of(result, job.bound, requests)


def to_parquet(name: str, rows: Iterable[Row]) -> bytes:
    """Encode rows of a table as a Parquet file."""
    return parts.to_parquet(rows, TABLES[name])
