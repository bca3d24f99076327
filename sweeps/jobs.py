"""The jobs of a sweep: a replay of every configuration on every trace, and the counts that bound them; batches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple, cast

import polars as pl

from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.policies.grammar import foresight
from moereplay.results import parts
from moereplay.results.parts import Part, Rows, by_layer_of, frame_bytes, key
from moereplay.results.result import Result, Row, searched
from moereplay.results.schema import table_schemas
from moereplay.results.settings import setting_kinds
from moereplay.simulator.bounds import Bound, Counted, bound_of, count
from moereplay.simulator.config import KINDS, SEMANTICS_VERSION, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import Sharing
from moereplay.simulator.replay import plan, replay
from moereplay.sweeps.grid import prefetches, shares
from moereplay.sweeps.store import fetched, is_url
from moereplay.traces.files import bundled
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.selection import accesses_of
from moereplay.traces.store import open_trace
from moereplay.traces.texts import whole

Kind = Literal["configuration", "bound"]


@dataclass(frozen=True)
class Job:
    """One replay, or one count that bounds replays."""

    kind: Kind  #: `bound` only feeds the table of bounds
    identity: str  #: hash of everything that the result depends on
    bound: str | None  #: identity of the count that bounds it, if there is one
    trace: Path
    digest: str  #: the trace's
    config: ReplayConfig  #: for a count, one of those that it bounds
    work: int  #: relative cost
    counted: Bound | None = None  #: for a count, its definition
    shares: str = ""  #: hash of all but the platform, if its decisions may be those of the same on another one

    @property
    def key(self) -> tuple[str, str]:
        """Unique key within the sweep."""
        return self.kind, self.identity

    @property
    def name(self) -> str:
        """Name in messages: identity, trace and settings that differ from the defaults."""
        changed = {name: value for name, value in self.config if value != ReplayConfig.model_fields[name].default}
        settings = " ".join(f"{name}={value}" for name, value in changed.items())
        return f"{self.identity} ({self.trace.name} {settings or 'with every default'})"


class Refusal(NamedTuple):
    """A configuration that cannot run on a trace, and why."""

    job: Job
    reason: str


def open_traces(patterns: Iterable[str], folder: Path, file: Path) -> list[Trace]:
    """Open traces by path or glob relative to `folder`, or by URL; each once. Raises ConfigError or TraceError."""
    found: dict[str, Trace] = {}
    paths = (path.resolve() for pattern in dict.fromkeys(patterns) for path in _paths(pattern, folder, file))
    for path in dict.fromkeys(paths):
        try:
            trace = open_trace(path)
        except TraceError as error:
            raise TraceError(f"{file}: traces: {error}") from None
        found.setdefault(trace.digest, trace)
    return list(found.values())


def _paths(pattern: str, folder: Path, file: Path) -> list[Path]:
    if "\0" in pattern:
        raise ConfigError(f"{file}: traces: invalid path {pattern!r}: it contains a zero byte")
    if is_url(pattern):
        return [fetched(pattern)]
    paths = (
        _matches(pattern, folder, file) if any(sign in pattern for sign in "*?[") else [bundled(Path(pattern), folder)]
    )
    if not paths:
        raise ConfigError(f"{file}: traces: nothing matches {pattern!r} in {folder.resolve()}")
    return paths


def _matches(pattern: str, folder: Path, file: Path) -> list[Path]:
    """Return the paths that a relative or absolute glob matches. Raises ConfigError for an invalid glob."""
    root = Path(pattern).anchor
    try:
        return sorted((Path(root) if root else folder).glob(pattern.removeprefix(root)))
    except (ValueError, NotImplementedError) as refused:
        raise ConfigError(f"{file}: traces: invalid glob {pattern!r}: {refused}") from None


def jobs_of(traces: Sequence[Trace], configs: Sequence[ReplayConfig], bounded: bool) -> tuple[list[Job], list[Refusal]]:
    """Return every distinct job, configurations before bounds, and those that cannot run on their trace."""
    jobs: dict[tuple[str, str], Job] = {}
    refusals: list[Refusal] = []
    for trace in traces:
        for config in configs:
            reason = _refusal(trace, config)
            bound = None if reason else bound_of(trace, config)
            job = _job(trace, config, bound)
            if reason:
                refusals.append(Refusal(job, reason))
            jobs.setdefault(job.key, job)
            if bounded and bound is not None:
                identity = bound.identity(trace)
                counting = Job("bound", identity, identity, *_where(trace), config, accesses_of(trace), bound)
                jobs.setdefault(counting.key, counting)
    return sorted(jobs.values(), key=lambda job: job.kind == "bound"), refusals


def job_of(trace: Trace, config: ReplayConfig) -> Job:
    """Return the job of a configuration on a stored trace; without a bound if it cannot run."""
    return _job(trace, config, None if _refusal(trace, config) else bound_of(trace, config))


def _job(trace: Trace, config: ReplayConfig, bound: Bound | None) -> Job:
    by = None if bound is None else bound.identity(trace)
    of = (config.identity(trace), by, *_where(trace), config, _work(trace, config))
    return Job("configuration", *of, shares=_shares(trace, config))


def _shares(trace: Trace, config: ReplayConfig) -> str:
    of = shares(config)
    return sha256(f"{trace.digest} {of}".encode()).hexdigest() if of else ""


def _where(trace: Trace) -> tuple[Path, str]:
    if trace.path is None:
        raise ConfigError("a sweep requires stored traces; write this one first")
    return trace.path, trace.digest


def _work(trace: Trace, config: ReplayConfig) -> int:
    """Return the relative cost: accesses before a pass's tokens share them, doubled where experts are prefetched."""
    return accesses_of(trace) * (1 + prefetches(config))


def in_groups(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return jobs together that may share decisions, in the order of the first of each group."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.shares or job.key, []).append(job)
    return list(groups.values())


def shard(jobs: Iterable[Job], share: tuple[int, int]) -> list[Job]:
    """Return the jobs of shard i of n, 1 <= i <= n; every process assigns a job to the same shard.

    By identity, or those that may share decisions by what they share.
    """
    index, of = share
    return [job for job in jobs if int(job.shares or job.identity, 16) % of == index - 1]


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `2/8` as (2, 8). Raises ConfigError."""
    index, of = (whole(part) for part in text.partition("/")[::2])
    if index is None or of is None or not 1 <= index <= of:
        raise ConfigError(f"invalid --shard {text!r}: expected i/n with 1 <= i <= n, for example 2/8")
    return index, of


def _refusal(trace: Trace, config: ReplayConfig) -> str | None:
    try:
        plan(trace, config)
    except (ConfigError, PolicyError) as error:
        return str(error)
    return None


# -- Batches: the jobs that one worker replays in turn, into one part


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
    by_layer: bool = False  #: whether rows per request and layer are kept however many they are


class Headline(NamedTuple):
    """Summary of a finished job for the driver."""

    key: tuple[str, str]
    seconds: float
    error: str | None
    figures: dict[str, float]
    shared: bool = False  #: whether it took over the decisions of another job
    foresees: bool = False  #: whether its policies know the future, as no real system does


class Computed(NamedTuple):
    """Result of a batch."""

    part: Part
    headlines: list[Headline]


def compute(batch: Batch, began: Callable[[int], None] = lambda position: None) -> Computed:
    """Replay a batch. A job that fails becomes an error row; `began` gets the position of each job as it starts."""
    tables: Rows = {}
    headlines, by_layer = [], dict[str, pl.DataFrame]()
    often, sharing, knows = Counter(job.shares for job in batch.jobs), Sharing(), foresight()
    for position, job in enumerate(batch.jobs):
        began(position)
        start, before = time.perf_counter(), sharing.taken
        result, error = _attempt(job, batch, sharing if job.shares and often[job.shares] > 1 else None)
        for table, rows in rows_of(job, result, error, batch.requests).items():
            tables.setdefault(table, []).extend(rows)
        if batch.requests and isinstance(result, Result) and result.request_layers:
            by_layer[job.identity] = by_layer_of(result)
        figures, taken = searched(result) if isinstance(result, Result) else {}, sharing.taken > before
        seconds, foresees = time.perf_counter() - start, knows(job.config.model_dump())
        headlines.append(Headline(job.key, seconds, error, figures, taken, foresees))
    files = {table: to_parquet(table, rows) for table, rows in tables.items() if rows}
    holds = _holds(batch, headlines)
    if by_layer:
        files["request_layers"], holds["request_layers"] = frame_bytes(pl.concat(by_layer.values())), sorted(by_layer)
    return Computed(Part(files, holds), headlines)


def _attempt(job: Job, batch: Batch, sharing: Sharing | None) -> tuple[Result | Counted | None, str | None]:
    try:
        files.register_all(batch.policies)
        trace = opened(job.trace, job.digest)
        if job.counted:
            return count(trace, job.counted), None
        kept = None if batch.requests and not batch.by_layer else batch.by_layer  # few if not said, none without rows
        return replay(trace, job.config, engine=batch.engine, sharing=sharing, by_layer=kept), None
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
