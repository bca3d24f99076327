"""Interface of the engines: the input of a run, its result, and decisions in steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from moereplay.policies.contract import GIVEN_PROFILE, NO_PROFILE, Eviction
from moereplay.policies.grammar import Chosen
from moereplay.results.result import Columns, Event, Row
from moereplay.simulator.arrivals import ShareSource
from moereplay.simulator.capacity import Listed, bytes_before, pairs_of, room
from moereplay.simulator.config import PolicySet, ReplayConfig
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
    tiers: tuple[tuple[int, ...], ...]  #: [p][row] bytes, by the geometry's rows
    slots: Geometry | None = None  #: the model as padded slots hold it

    @cached_property
    def precisions(self) -> int:
        """P, the number of precision tiers."""
        return len(self.tiers)

    @cached_property
    def experts(self) -> int:
        """L * E, the number of experts of all layers."""
        return self.geometry.layers * self.geometry.experts

    @cached_property
    def rows(self) -> np.ndarray:
        """The row of every expert x."""
        return self.geometry.rows.of

    @cached_property
    def own_bytes(self) -> np.ndarray:
        """(copies,) int64: the bytes of every copy y, which links carry and lower tiers hold."""
        return np.array(self.tiers, np.int64)[:, self.rows].T.ravel()

    @cached_property
    def taken(self) -> np.ndarray:
        """(copies,) int64: the bytes that every copy y takes of its pool in the fast tier."""
        return self.own_bytes if self.slots is None else self.slots.rows.bytes

    @property
    def fewest(self) -> tuple[int, ...]:
        """The fewest bytes that a copy of each layer takes."""
        return tuple(self.taken.reshape(self.geometry.layers, -1).min(1).tolist())


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
    by_layer: bool = False  #: whether rows per request and layer are kept

    def beside(self, resident: Listed) -> RunSpec:
        """Return the run with these (layer, expert) in the fast tier for good.

        Raises ConfigError if they do not fit.
        """
        if not resident:
            return self
        miss, experts = self.chosen.miss, self.layout.geometry.experts
        fetches = not miss.policy.never_fetches(miss.params)
        left = room(self.pools, self.pool_of, self.most_precise.tolist(), experts, resident, fetches)
        copies = [(layer * experts + expert) * self.layout.precisions for layer, expert in resident]
        return replace(self, pools=left, resident=tuple(copies))

    @cached_property
    def most_precise(self) -> np.ndarray:
        """(experts,) int64: the bytes that the most precise copy of every expert x takes of its pool."""
        return self.layout.taken[:: self.layout.precisions]

    @cached_property
    def pool_of(self) -> tuple[int, ...]:
        """Return the pool of every expert x."""
        return tuple(self._pools(np.arange(self.layout.experts)).tolist())

    def _pools(self, x: np.ndarray) -> np.ndarray:
        if self.config.scope == "per_link":
            return np.array(self.times.homes)[x]
        return x // self.layout.geometry.experts if len(self.pools) > 1 else np.zeros_like(x)

    @cached_property
    def warm(self) -> list[int]:
        """Copies y that are in the fast tier from the start, at the highest precision."""
        return (self.start[0] * self.layout.precisions).tolist()

    @cached_property
    def warm_lower(self) -> list[list[int]]:
        """Copies y that are in each lower tier from the start, the first to be evicted first."""
        return [(x[::-1] * self.layout.precisions).tolist() for x in self.start[1:]]

    @cached_property
    def start(self) -> list[np.ndarray]:
        """The experts x of --warm by tier, from the top down: each tier has what the ones above have no room for.

        Raises ConfigError for more than the tiers hold.
        """
        pairs, experts = pairs_of(self.config.warm), self.layout.geometry.experts
        x = pairs[:, 0] * experts + pairs[:, 1]
        pools, sizes = self._pools(x), self.most_precise[x]
        # what follows one that does not fit lies below
        held = bytes_before(pools, sizes) + sizes <= np.array(self.pools)[pools]
        if not self.lower and not held.all():
            pool = int(pools[~held][0])
            raise ConfigError(
                f"--warm fills pool {pool} with {int(sizes[pools == pool].sum()):,} bytes, its capacity is "
                f"{self.pools[pool]:,}; name fewer experts"
            )
        tiers, rest = [x[held]], x[~held]
        sizes = self.layout.own_bytes[rest * self.layout.precisions]
        for size in self.lower:
            many = int(np.searchsorted(np.cumsum(sizes), size, "right"))
            tiers.append(rest[:many])
            rest, sizes = rest[many:], sizes[many:]
        if len(rest):
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
        return frozenset(each.policy.name for each in self.chosen.all)

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

    def request_layers(self) -> Columns:
        """Return the columns of a row per request, layer and phase, in run order; empty if they were not kept."""
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
    how, fitted = (config.schedule, config.arrive), _wanted(config, eviction)
    uses = shared(trace, ("first uses", *how), lambda: _first_uses(source()))
    if fitted == GIVEN_PROFILE:  # sooner made than looked up
        return Oracle(*uses, ranking(source(), config, eviction))
    return Oracle(*uses, shared(trace, ("ranking", *how, fitted), lambda: ranking(source(), config, eviction)))


def _first_uses(source: Gates) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and passes as read-only int64 arrays, which every replay copies."""
    positions = source.first_uses()
    passes = [*map(source.pass_of, positions)]
    return read_only(np.array(positions, np.int64)), read_only(np.array(passes, np.int64))


def oracle_of(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> Oracle:
    """Return the oracle information of a source."""
    first_uses = source.first_uses()
    return Oracle(first_uses, [*map(source.pass_of, first_uses)], ranking(source, config, eviction))


def ranking(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> list[int]:
    """Return experts x by descending value; [] if the policy is not fitted to a profile.

    A profile of demand ranks the most often chosen first, ties by lowest id, without experts that were never chosen.
    """
    wanted = _wanted(config, eviction)
    if wanted == NO_PROFILE:
        return []
    if wanted == GIVEN_PROFILE:
        return (pairs_of(config.profile) @ (source.geometry.experts, 1)).tolist()
    counts = source.popularity(wanted)
    return sorted((x for x, count in enumerate(counts) if count > 0), key=lambda x: (-counts[x], x))


def _wanted(config: ReplayConfig, eviction: Chosen[Eviction]) -> int:
    return replace(config.policy_set(), eviction=eviction).profile


def check_profile_is_read(configs: Sequence[ReplayConfig]) -> None:
    """Raises ConfigError if a profile is given that no policy of these configurations reads."""
    given = [config.policy_set().profile for config in configs if config.profile]
    if given and GIVEN_PROFILE not in given:
        raise ConfigError("--profile requires a policy that reads it, such as --eviction static:profile=given")
