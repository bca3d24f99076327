"""The most hits of residents that never change: those of a fixed set of experts, chosen with hindsight.

Accesses of an expert are hits if it is of the set, whatever else happens, so that the best set of a pool is the experts
of most accesses. `preloaded`: the set is resident before the run and after each reset, at no charge. `loaded_once`:
each of its experts is loaded by its own first access after the start and after each reset, which is a miss; that is one
way to evict, so it hits no more than the relaxed bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moereplay.simulator.bounds import Bound
from moereplay.simulator.curves.stream import Demands, demands_of
from moereplay.traces.schema import Trace


class FixedSet(NamedTuple):
    """Hits of the best fixed sets; the two sets may differ."""

    preloaded: int
    loaded_once: int


def fixed_set(trace: Trace, bound: Bound) -> FixedSet:
    """The most hits of a fixed set in the pools of a bound, whose slots must be known."""
    layers, experts = trace.geometry.layers, trace.geometry.experts
    demands = demands_of(trace, bound.passes, bound.reset)
    unit, begun = _accesses(demands, layers, experts)
    accesses = np.bincount(unit, minlength=layers * experts)
    loads = np.bincount(np.unique(begun * (layers * experts) + unit) % (layers * experts), minlength=layers * experts)
    for layer, expert in bound.warm:  # its first access is a hit, if there is one before a reset
        x = layer * experts + expert
        loads[x] -= bool(((unit == x) & (begun == 0)).any())
    pools = layers if bound.scope == "per_layer" else 1
    return FixedSet(*(_most(hits.reshape(pools, -1), bound.slots) for hits in (accesses, accesses - loads)))


def _accesses(demands: Demands, layers: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every access, its expert of the model and how many resets came before it, (n,) int64 each."""
    steps, many = np.arange(len(demands.offsets) - 1), np.diff(demands.offsets)
    unit = np.repeat(steps % layers, many) * experts + demands.expert
    return unit, np.repeat(np.cumsum(demands.fresh)[steps // layers], many)


def _most(hits: np.ndarray, slots: tuple[int, ...]) -> int:
    """The sum of the largest of each pool's row, as many as it has slots."""
    best = -np.sort(-hits, axis=1)
    return sum(int(row[:many].sum()) for row, many in zip(best, slots, strict=True))
