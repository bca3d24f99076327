"""The interface of both engines: what a run is given beside its source, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from moereplay.results.result import Event, Row
from moereplay.simulator.config import PolicySet, ReplayConfig
from moereplay.simulator.times import Times
from moereplay.traces.schema import Geometry


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
