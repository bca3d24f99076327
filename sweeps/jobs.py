"""List the jobs of a sweep: a replay of every configuration on every trace, and the counts that bound them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

from moereplay.policies.contract import PolicyError
from moereplay.simulator.bounds import Bound, bound_of
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan
from moereplay.sweeps.grid import prefetches, shares
from moereplay.sweeps.objects import fetched, is_url
from moereplay.traces.installation import bundled
from moereplay.traces.schema import Trace, TraceError
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
                counting = _counting(trace, config, bound)
                jobs.setdefault(counting.key, counting)
    return sorted(jobs.values(), key=lambda job: job.kind == "bound"), refusals


def job_of(trace: Trace, config: ReplayConfig) -> Job:
    """Return the job of a configuration on a stored trace; without a bound if it cannot run."""
    return _job(trace, config, None if _refusal(trace, config) else bound_of(trace, config))


def _job(trace: Trace, config: ReplayConfig, bound: Bound | None) -> Job:
    by = None if bound is None else bound.identity(trace)
    of = (config.identity(trace), by, *_where(trace), config, _work(trace, config))
    return Job("configuration", *of, shares=_shares(trace, config))


def _counting(trace: Trace, config: ReplayConfig, bound: Bound) -> Job:
    """Return the count that bounds a configuration and others like it."""
    identity = bound.identity(trace)
    return Job("bound", identity, identity, *_where(trace), config, _accesses(trace), bound)


def _shares(trace: Trace, config: ReplayConfig) -> str:
    of = shares(config)
    return sha256(f"{trace.digest} {of}".encode()).hexdigest() if of else ""


def _where(trace: Trace) -> tuple[Path, str]:
    if trace.path is None:
        raise ConfigError("a sweep requires stored traces; write this one first")
    return trace.path, trace.digest


def _work(trace: Trace, config: ReplayConfig) -> int:
    """Return the relative cost: accesses, doubled for prefetching configurations."""
    return _accesses(trace) * (1 + prefetches(config))


def in_groups(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return jobs together that may share decisions, in the order of the first of each group."""
    groups: dict[Hashable, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.shares or job.key, []).append(job)
    return list(groups.values())


def _accesses(trace: Trace) -> int:
    """Count accesses before the union over the tokens of a pass."""
    return trace.tokens * trace.geometry.layers * trace.geometry.k


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
