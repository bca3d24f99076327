"""Input and output of the curve kernels: the demand stream with its resets, its look-ups, and the counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moereplay.simulator.config import parse_reset
from moereplay.simulator.threads import check_stop
from moereplay.traces.demand import demand_of
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Trace
from moereplay.traces.units import NEVER

STEPS_AT_ONCE = 1 << 16  #: per call of a kernel, between which it may be stopped
FIRST_USE = 1 << 62  #: the depth of an expert that has not been used since the start or the last reset
NOWHERE = -1


class Demands(NamedTuple):
    """The demand stream as `traces.demand.Demand` has it; memory-mapped if the trace is on disk."""

    offsets: np.ndarray  #: (P * L + 1,) int64
    expert: np.ndarray  #: (n,) int16, of the layer
    next_use: np.ndarray  #: (n,) int64
    fresh: np.ndarray  #: (P,) bool: the cache is cleared before this pass


class Cut(NamedTuple):
    """Division of the stream into pools and look-ups."""

    layers: int
    experts: int  #: of a layer
    per_layer: bool  #: a pool per layer, or one
    atomic: bool  #: a step's experts are looked up together, or one by one

    @property
    def pools(self) -> int:
        """Number of caches."""
        return self.layers if self.per_layer else 1

    @property
    def units(self) -> int:
        """Experts that share a cache."""
        return self.experts if self.per_layer else self.layers * self.experts


class Tally(NamedTuple):
    """Accesses by the smallest of G rising capacities at which they hit."""

    grid: np.ndarray  #: (G,) int64, in the unit of depths; empty means 1, 2, ... G
    found: np.ndarray  #: (L, G + 2) int64; column G hits at no capacity of the grid, G + 1 is a first use
    undecided: np.ndarray  #: (G + 1,) int64: +1 at the start of a range of undecided capacities, -1 after its end


def demands_of(trace: Trace, passes: str, reset: str) -> Demands:
    """Return the stream of a trace under a schedule. Raises TraceError or ValueError for an unknown setting."""
    demand = demand_of(trace, passes)
    fresh = resets(schedule(trace, passes), reset)
    return Demands(*(_locked(array) for array in (demand.offsets, demand.expert, demand.next_use, fresh)))


def without(demands: Demands, cut: Cut, resident: Sequence[int]) -> tuple[Demands, np.ndarray]:
    """Return the stream without the demand for some experts x, and the new place of each position; of NEVER last."""
    offsets, steps = np.asarray(demands.offsets), len(demands.offsets) - 1
    layer = np.repeat(np.arange(steps) % cut.layers, np.diff(offsets))
    kept = ~np.isin(layer * cut.experts + demands.expert, list(resident))
    place = np.append(np.cumsum(kept) - 1, NEVER)
    next_use = place[demands.next_use[kept].clip(max=len(kept))]
    counted = np.concatenate([[0], np.cumsum(kept)])[offsets]
    return Demands(*map(_locked, (counted, demands.expert[kept], next_use, demands.fresh))), place


def resets(plan: Passes, reset: str) -> np.ndarray:
    """Return which passes start with an empty cache because of `reset`, (P,); the first one always does."""
    fresh, every = np.zeros(len(plan), bool), parse_reset(reset)
    if every < 0:
        fresh = plan.apart()
    if every > 0:
        begun = 0
        while (begun := int(np.searchsorted(plan.start, plan.start[begun] + every))) < len(plan):
            fresh[begun] = True
    return fresh


def tally(layers: int, capacities: int, grid: np.ndarray | None = None) -> Tally:
    """Return zeros for so many capacities: those of `grid`, or 1, 2, 3 and so on."""
    found, undecided = np.zeros((layers, capacities + 2), np.int64), np.zeros(capacities + 1, np.int64)
    return Tally(np.empty(0, np.int64) if grid is None else grid, found, undecided)


def spans(demands: Demands, done: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Yield ranges of steps [first, last); `done` is called with the length of each counted range.

    Raises KeyboardInterrupt before a range if the count is to stop.
    """
    steps = len(demands.offsets) - 1
    for first in range(0, steps, STEPS_AT_ONCE):
        check_stop()
        last = min(first + STEPS_AT_ONCE, steps)
        yield first, last
        done(last - first)


def _locked(array: np.ndarray) -> np.ndarray:
    """Return a plain read-only view, so that memory maps and arrays have one type."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
