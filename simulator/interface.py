"""Interface of the engines: the input of a run, its result, and decisions in steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from moereplay.policies.contract import GIVEN_PROFILE, NO_PROFILE, Eviction
from moereplay.policies.grammar import Chosen
from moereplay.results.result import Event, Row
from moereplay.simulator.arrivals import ShareSource
from moereplay.simulator.capacity import Listed, room
from moereplay.simulator.config import KINDS, PolicySet, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.source import Gates, TraceSource
from moereplay.simulator.times import Times
from moereplay.traces.derived import read_only, shared
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.texts import counted


@dataclass(frozen=True)
class CopyLayout:
    """Dense numbering of experts x = layer * E + e and copies y = x * P + p, and the bytes of a copy."""

    geometry: Geometry
    tiers: tuple[tuple[int, ...], ...]  #: [p][layer] bytes

    @cached_property
    def precisions(self) -> int:
        """P, the number of precision tiers."""
        return len(self.tiers)

    @cached_property
    def experts(self) -> int:
        """L * E, the number of experts of all layers."""
        return self.geometry.layers * self.geometry.experts


@dataclass(frozen=True)
class RunSpec:
    """Validated input of a run, besides its source."""

    config: ReplayConfig
    layout: CopyLayout
    times: Times
    pools: tuple[int, ...]  #: bytes of each, beside `resident`
    log: bool = False  #: whether events are kept
    lower: tuple[int, ...] = ()  #: bytes of each tier between the fast and the slow one, from the top down
    resident: tuple[int, ...] = ()  #: copies y that are in the fast tier for good
    arrivals: tuple[int, ...] = ()  #: when each request arrives, ns; empty if all are there at the start

    def beside(self, resident: Listed) -> RunSpec:
        """Return the run with these (layer, expert) in the fast tier for good.

        Raises ConfigError if they do not fit.
        """
        if not resident:
            return self
        miss, experts = self.chosen.miss, self.layout.geometry.experts
        fetches = not miss.policy.never_fetches(miss.params)
        left = room(self.pools, self.pool_of, self.layout.tiers[0], resident, fetches)
        copies = [(layer * experts + expert) * self.layout.precisions for layer, expert in resident]
        return replace(self, pools=left, resident=tuple(copies))

    @cached_property
    def pool_of(self) -> tuple[int, ...]:
        """Return the pool of every expert x."""
        if self.config.scope == "per_link":
            return self.times.homes
        experts, per_layer = self.layout.geometry.experts, len(self.pools) > 1
        return tuple(x // experts if per_layer else 0 for x in range(self.layout.experts))

    @cached_property
    def warm(self) -> list[int]:
        """Copies y that are in the fast tier from the start, at the highest precision."""
        return [self._copy(pair) for pair in self.start[0]]

    @cached_property
    def warm_lower(self) -> list[list[int]]:
        """Copies y that are in each lower tier from the start, the first to be evicted first."""
        return [[self._copy(pair) for pair in reversed(pairs)] for pairs in self.start[1:]]

    def _copy(self, pair: tuple[int, int]) -> int:
        return (pair[0] * self.layout.geometry.experts + pair[1]) * self.layout.precisions

    @cached_property
    def start(self) -> list[Listed]:
        """The experts of --warm by tier, from the top down: each tier has those that the ones above have no room for.

        Raises ConfigError for more than the tiers hold.
        """
        sizes, experts = self.layout.tiers[0], self.layout.geometry.experts
        left, held, rest = list(self.pools), list[tuple[int, int]](), list[tuple[int, int]]()
        for layer, expert in self.config.warm:
            pool = self.pool_of[layer * experts + expert]
            if left[pool] < sizes[layer] and not self.lower:
                given = sum(sizes[at] for at, of in self.config.warm if self.pool_of[at * experts + of] == pool)
                raise ConfigError(
                    f"--warm fills pool {pool} with {given:,} bytes, its capacity is {self.pools[pool]:,}; name fewer "
                    "experts"
                )
            fits = left[pool] >= sizes[layer]
            left[pool] = left[pool] - sizes[layer] if fits else 0  # what follows one that does not fit lies below
            (held if fits else rest).append((layer, expert))
        tiers = [tuple(held)]
        for size in self.lower:
            filled = list(accumulate(sizes[layer] for layer, _ in rest))
            many = bisect_right(filled, size)
            tiers.append(tuple(rest[:many]))
            rest = rest[many:]
        if rest:
            raise ConfigError(f"--warm lists {counted(len(rest), 'expert')} more than all tiers hold; name fewer")
        return tiers

    @cached_property
    def chosen(self) -> PolicySet:
        """The four policies, parsed once for the whole run."""
        return self.config.policy_set()

    def source_of(self, trace: Trace) -> ShareSource | TraceSource:
        """Return the demand of a trace as this run reads it."""
        config, how = self.config, (self.chosen.prefetch, self.chosen.needs, (self.config.lookahead, self.config.seed))
        if self.arrivals:
            return ShareSource(trace, config.schedule, len(self.arrivals), *how)
        return TraceSource(trace, config.schedule, *how)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(getattr(self.chosen, kind).policy.name for kind in KINDS)

    def decision_ns(self, layer: int, tokens: int) -> int:
        """Return the time that the policies' decisions add to the dense time of a step."""
        if not self.times.has_decisions:
            return 0
        prefetch, later = self.chosen.prefetch, self.layout.geometry.layers - 1 - layer
        return self.times.decision_ns(self._names, min(prefetch.policy.gates_ahead(prefetch.params), later), tokens)


class RunCounters(Protocol):
    """Counters of a finished run."""

    def totals(self, end: int) -> Row:
        """Return sums over layers and phases; `end` is the time at which the run ended, ns."""
        ...

    def per_layer(self) -> list[Row]:
        """Return a row per layer and phase."""
        ...

    def per_request(self) -> list[Row]:
        """Return a row per request in run order."""
        ...


class FinishedRun(NamedTuple):
    """Counters, end time and events of a finished run."""

    counters: RunCounters
    end_ns: int
    events: Sequence[Event]


class Sharing:
    """The decisions of the latest of several replays, for those that follow on another platform."""

    def __init__(self) -> None:
        self.taken = 0  #: replays that took over the decisions of another
        self._key: Hashable = None
        self._run: Any = None

    def run_of(self, key: Hashable) -> Any:
        """Return the run whose decisions follow from `key`, or None."""
        return self._run if key == self._key else None

    def keep(self, key: Hashable, run: Any) -> None:
        """Keep the decisions of a run in place of the last."""
        self._key, self._run = key, run


class EndState(NamedTuple):
    """A finished run and the state at its end, for comparing engines."""

    ran: FinishedRun
    residents: Sequence[int]  #: copies y
    memories: Sequence[Sequence[Any]]  #: own.rows, own.regs and own.reals of the four policies, in the order of KINDS


# decisions in steps

NO_COPY = -1  #: in place of a copy, of a dense part or a reset
#: What is begun, in the words of the event log.
ACTED_ON = ("dense", "expert", "transfer", "evict", "reset")


class Begun(NamedTuple):
    """One activity or action that begins."""

    kind: str  #: one of ACTED_ON
    layer: int
    y: int  #: copy, NO_COPY of a dense part or a reset
    tokens: int  #: of a dense part or an expert
    cause: str  #: as in the event log
    line: int  #: of the event log


class Decisions(Protocol):
    """A decision engine that is driven step by step. Times are integer nanoseconds of the machine's clock."""

    @property
    def is_over(self) -> bool:
        """True if compute has nothing left to do."""
        ...

    @property
    def is_called_up(self) -> bool:
        """True if blocked compute can go on: call `resumed` after all transfers that land now."""
        ...

    def begin(self, now: int) -> Sequence[Begun]:
        """Start the run; return what begins."""
        ...

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """Report that compute finished its activity at `now` after `elapsed` ns; return what begins."""
        ...

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """Report that the oldest transfer in flight, of copy y, landed; return what begins.

        It kept the link for `elapsed` ns.
        """
        ...

    def resumed(self, now: int) -> Sequence[Begun]:
        """Resume blocked compute; return what begins."""
        ...

    def abandoned(self, y: int, elapsed: int) -> None:
        """Report the end of a transfer that a reset or the end of the run abandoned."""
        ...

    def note_end(self, line: int, now: int) -> None:
        """Set the end time of this line of the event log."""
        ...

    def close(self) -> FinishedRun:
        """Return counters and event log; the run ended with its last step."""
        ...


# oracle information


class Oracle(NamedTuple):
    """Oracle information of a run; a field is empty if it is unknown or no policy needs it."""

    first_uses: Sequence[int] | np.ndarray  #: position of each expert's first demand
    first_passes: Sequence[int] | np.ndarray  #: and the pass of that
    ranking: Sequence[int]  #: experts x of the profile, the most valuable first


NO_ORACLE = Oracle((), (), ())


def oracle_of_trace(
    trace: Trace, source: Callable[[], Gates], config: ReplayConfig, eviction: Chosen[Eviction]
) -> Oracle:
    """Return the oracle information of a trace, computed from `source` once per process."""
    what = ("oracle", config.schedule, config.arrive, _wanted(config, eviction), config.profile)
    return shared(trace, what, lambda: _as_arrays(oracle_of(source(), config, eviction)))


def _as_arrays(oracle: Oracle) -> Oracle:
    """Convert to read-only int64 arrays, which every replay copies."""
    first_uses, first_passes = (read_only(np.array(uses, np.int64)) for uses in oracle[:2])
    return Oracle(first_uses, first_passes, oracle.ranking)


def oracle_of(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> Oracle:
    """Return the oracle information of a source."""
    first_uses = source.first_uses()
    first_passes = [source.pass_of(position) for position in first_uses]
    return Oracle(first_uses, first_passes, ranking(source, config, eviction))


def ranking(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> list[int]:
    """Return experts x by descending value; [] if the policy is not fitted to a profile.

    A profile of demand ranks the most often chosen first, ties by lowest id, without experts that were never chosen.
    """
    wanted = _wanted(config, eviction)
    if wanted == NO_PROFILE:
        return []
    if wanted == GIVEN_PROFILE:
        return [layer * source.geometry.experts + expert for layer, expert in config.profile]
    counts = source.popularity(wanted)
    return sorted((x for x, count in enumerate(counts) if count > 0), key=lambda x: (-counts[x], x))


def _wanted(config: ReplayConfig, eviction: Chosen[Eviction]) -> int:
    return replace(config.policy_set(), eviction=eviction).profile


def check_profile_is_read(configs: Sequence[ReplayConfig]) -> None:
    """Raises ConfigError if a profile is given that no policy of these configurations reads."""
    given = [config.policy_set().profile for config in configs if config.profile]
    if given and GIVEN_PROFILE not in given:
        raise ConfigError("--profile requires a policy that reads it, such as --eviction static:profile=given")
