"""The interface of both engines: what a run is given beside its source, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from moereplay.policies.contract import GIVEN_PROFILE, NO_PROFILE, Eviction, PolicyError
from moereplay.policies.grammar import Chosen
from moereplay.results.result import Event, Row
from moereplay.simulator.config import PolicySet, ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.source import Gates
from moereplay.simulator.times import Times
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.shared import read_only, shared


@dataclass(frozen=True)
class CopyLayout:
    """The dense numbering of experts x = layer * E + e and copies y = x * P + p, and the bytes of a copy."""

    geometry: Geometry
    tiers: tuple[tuple[int, ...], ...]  #: [p][layer] bytes

    @cached_property
    def precisions(self) -> int:
        """P, the number of precision tiers."""
        return len(self.tiers)

    @cached_property
    def experts(self) -> int:
        """L * E, the experts of all layers."""
        return self.geometry.layers * self.geometry.experts


@dataclass(frozen=True)
class RunSpec:
    """Everything that a run needs beside its source, checked."""

    config: ReplayConfig
    layout: CopyLayout
    times: Times
    pools: tuple[int, ...]  #: bytes of each
    log: bool = False  #: whether events are kept
    lower: tuple[int, ...] = ()  #: bytes of each tier between the fast and the slow one, from the top down

    @cached_property
    def warm(self) -> list[int]:
        """Copies that are in the fast tier from the start, of the most precise tier."""
        experts, precisions = self.layout.geometry.experts, self.layout.precisions
        return [(layer * experts + expert) * precisions for layer, expert in self.config.warm]

    @cached_property
    def chosen(self) -> PolicySet:
        """The four policies, parsed once for the whole run."""
        return self.config.policy_set()


class RunCounters(Protocol):
    """The counters of a finished run."""

    def totals(self, end: int) -> Row:
        """Sums over layers and phases; `end` is the time at which the run ended, ns."""
        ...

    def per_layer(self) -> list[Row]:
        """A row per layer and phase."""
        ...

    def per_request(self) -> list[Row]:
        """A row per request in run order."""
        ...


class FinishedRun(NamedTuple):
    """The counters, the end and the events of a finished run."""

    counters: RunCounters
    end_ns: int
    events: Sequence[Event]


class EndState(NamedTuple):
    """A finished run with the state that it ended in, for comparing engines."""

    ran: FinishedRun
    residents: Sequence[int]  #: copies y
    memories: Sequence[Sequence[Any]]  #: own.rows, own.regs and own.reals of the four policies, in the order of KINDS


# -- Who decides, apart from what takes time: it learns what has ended, and says what begins.

NO_COPY = -1
#: What is begun, in the words of the event log.
ACTED_ON = ("dense", "expert", "transfer", "evict", "reset")


class Begun(NamedTuple):
    """Something that begins."""

    kind: str  #: one of ACTED_ON
    layer: int
    y: int  #: copy, NO_COPY of a dense part or a reset
    tokens: int  #: of a dense part or an expert
    cause: str  #: as in the event log
    line: int  #: of the event log


class Decisions(Protocol):
    """Who decides in a run. Times are integer nanoseconds of the machine's clock."""

    @property
    def is_over(self) -> bool:
        """Whether compute has nothing left to do."""
        ...

    @property
    def is_called_up(self) -> bool:
        """Whether compute, which waited, may go on: `resumed` is due when nothing else lands now."""
        ...

    def begin(self, now: int) -> Sequence[Begun]:
        """The run begins."""
        ...

    def computed(self, now: int, elapsed: int) -> Sequence[Begun]:
        """Compute has ended, at `now`, what it was busy with for `elapsed` ns."""
        ...

    def landed(self, y: int, now: int, elapsed: int) -> Sequence[Begun]:
        """The oldest transfer under way, of copy y, is complete; it kept the link for `elapsed` ns."""
        ...

    def resumed(self, now: int) -> Sequence[Begun]:
        """Compute goes on."""
        ...

    def abandoned(self, y: int, elapsed: int) -> None:
        """A transfer has ended that a reset, or the end of the run, has abandoned."""
        ...

    def note_end(self, line: int, now: int) -> None:
        """What began in this line of the event log was over at `now`."""
        ...

    def close(self) -> FinishedRun:
        """The counters and the event log; the run ended with its last step."""
        ...


# -- Oracle information: when every expert is demanded first, and the ranking that a fitted policy goes by.


class Oracle(NamedTuple):
    """What policies may know before a run; a field is empty where it is unknown or no policy needs it."""

    first_uses: Sequence[int] | np.ndarray  #: position of each expert's first demand
    first_passes: Sequence[int] | np.ndarray  #: and the pass of that
    ranking: Sequence[int]  #: experts x of the profile, the most valuable first


NO_ORACLE = Oracle((), (), ())


def oracle_of_trace(
    trace: Trace, source: Callable[[], Gates], config: ReplayConfig, eviction: Chosen[Eviction]
) -> Oracle:
    """The oracle information of a trace, taken from its `source` once for all replays of this process."""
    what = ("oracle", config.passes, eviction.policy.profile(eviction.params), config.profile)
    return shared(trace, what, lambda: _as_arrays(oracle_of(source(), config, eviction)))


def _as_arrays(oracle: Oracle) -> Oracle:
    """int64 arrays, read-only: every replay copies them."""
    first_uses, first_passes = (read_only(np.array(uses, np.int64)) for uses in oracle[:2])
    return Oracle(first_uses, first_passes, oracle.ranking)


def oracle_of(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> Oracle:
    """The oracle information of a source."""
    first_uses = source.first_uses()
    first_passes = [source.pass_of(position) for position in first_uses]
    return Oracle(first_uses, first_passes, ranking(source, config, eviction))


def ranking(source: Gates, config: ReplayConfig, eviction: Chosen[Eviction]) -> list[int]:
    """Experts x, the most valuable first; [] if the policy is not fitted to anything.

    By demand: the most often chosen first, ties by lowest id, without those that were never chosen.
    """
    wanted = eviction.policy.profile(eviction.params)
    if wanted == NO_PROFILE:
        return []
    if wanted == GIVEN_PROFILE:
        return [layer * source.geometry.experts + expert for layer, expert in config.profile]
    counts = source.popularity(wanted)
    return sorted((x for x, count in enumerate(counts) if count > 0), key=lambda x: (-counts[x], x))


def check_profile_is_read(configs: Sequence[ReplayConfig]) -> None:
    """Raises ConfigError for a given profile that no policy of theirs is fitted to."""
    evictions = [config.policy_set().eviction for config in configs if config.profile]
    if evictions and not any(each.policy.profile(each.params) == GIVEN_PROFILE for each in evictions):
        raise ConfigError("--profile: no policy here reads it; write for example --eviction static:profile=given")


def check_profile(config: ReplayConfig, eviction: Chosen[Eviction]) -> None:
    """Raises PolicyError if the policy is fitted to a profile that is not given."""
    if eviction.policy.profile(eviction.params) == GIVEN_PROFILE and not config.profile:
        raise PolicyError(f"eviction {eviction.text()} is fitted to a profile; give one with --profile FILE")
