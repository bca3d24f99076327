"""The demand of every step: which experts the pass's tokens use, in demand order, and when each is demanded next.

A step is (pass, layer). Demand order is by descending largest gate weight over the pass's tokens, ties by lowest id;
without weights by best rank, then token count, then id. Weights are integers, round(weight * 2**24) half to even.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from traces.derived import derived
from traces.passes import Passes, schedule
from traces.schema import Trace

UNIT = 1 << 24
NEVER = 1 << 60
TOKENS_AT_ONCE = 1 << 14


class Union(NamedTuple):
    """One step's demand: n experts in demand order, as lists."""

    expert: Sequence[int]  #: expert of the layer
    rank: Sequence[int]  #: best (lowest) rank over the tokens
    mass: Sequence[int]  #: largest gate weight over the tokens, in UNITs; 0 without weights
    mass_sum: Sequence[int]  #: sum of its gate weights over the tokens, in UNITs
    tokens: Sequence[int]  #: tokens routed to it
    next_use: Sequence[int]  #: position of its next demand in the flattened stream, or NEVER; empty if unknown


@dataclass(frozen=True)
class Demand:
    """The flattened demand stream; step s = pass * L + layer holds entries [offsets[s], offsets[s + 1])."""

    offsets: np.ndarray  #: (P * L + 1,) int64
    expert: np.ndarray  #: (n,) int32
    rank: np.ndarray  #: (n,) int32
    mass: np.ndarray  #: (n,) int64
    mass_sum: np.ndarray  #: (n,) int64
    tokens: np.ndarray  #: (n,) int32
    next_use: np.ndarray  #: (n,) int64
    first_use: np.ndarray  #: (L * E,) int64: position of the first demand, or NEVER

    def step(self, index: int) -> Union:
        """The demand of one step."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Union(*(getattr(self, name)[span].tolist() for name in Union._fields))


def to_units(weights: np.ndarray) -> np.ndarray:
    """Weights or probabilities as integers."""
    return np.rint(weights.astype(np.float64) * UNIT).astype(np.int64)


def unite(ids: Sequence[Sequence[int]], mass: Sequence[Sequence[int]]) -> Union:
    """The demand of one step from chosen ids (T, k) and their weights in UNITs (T, k), or () without weights."""
    entries: dict[int, list[int]] = {}
    for t, row in enumerate(ids):
        for rank, expert in enumerate(row):
            if expert < 0:
                continue
            weight = mass[t][rank] if mass else 0
            entry = entries.setdefault(expert, [rank, weight, 0, 0])
            entry[0], entry[1] = min(entry[0], rank), max(entry[1], weight)
            entry[2] += weight
            entry[3] += 1
    if mass:
        order = sorted(entries, key=lambda expert: (-entries[expert][1], expert))
    else:
        order = sorted(entries, key=lambda expert: (entries[expert][0], -entries[expert][3], expert))
    columns = zip(*(entries[expert] for expert in order), strict=True) if order else ([], [], [], [])
    return Union(order, *map(list, columns), next_use=[])


def demand_of(trace: Trace, passes: str) -> Demand:
    """The demand of a trace under a schedule, from the cache of derived arrays or made now."""
    names = [field.name for field in fields(Demand)]
    return Demand(**derived(trace, f"demand-{passes}", names, lambda: vars(_derive(trace, passes))))


def _derive(trace: Trace, passes: str) -> Demand:
    plan, geometry = schedule(trace, passes), trace.geometry
    parts = [_block(trace, plan, first, last) for first, last in _blocks(plan)]
    step, expert, rank, mass, mass_sum, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
    offsets = np.searchsorted(step, np.arange(len(plan) * geometry.layers + 1))
    unit = (step % geometry.layers) * geometry.experts + expert
    next_use, first_use = _uses(unit, geometry.layers * geometry.experts)
    narrow = (expert.astype(np.int32), rank.astype(np.int32), mass, mass_sum, tokens.astype(np.int32))
    return Demand(offsets.astype(np.int64), *narrow, next_use, first_use)


def _blocks(plan: Passes) -> list[tuple[int, int]]:
    """Ranges of passes of about TOKENS_AT_ONCE tokens, so that memory stays bounded."""
    edges = np.flatnonzero(np.diff(plan.start // TOKENS_AT_ONCE)) + 1
    bounds = [0, *edges.tolist(), len(plan)]
    return list(itertools.pairwise(bounds))


def _block(trace: Trace, plan: Passes, first: int, last: int) -> tuple[np.ndarray, ...]:
    """(step, expert, rank, mass, mass_sum, tokens) of passes [first, last), in demand order."""
    begin, end = int(plan.start[first]), int(plan.stop[last - 1])
    ids = trace.read("chosen", begin, end).astype(np.int64)
    weighted = "weights" in trace.arrays
    mass = to_units(trace.read("weights", begin, end)) if weighted else np.zeros_like(ids)
    layers, experts = trace.geometry.layers, trace.geometry.experts
    pass_of = first + np.repeat(np.arange(last - first), plan.stop[first:last] - plan.start[first:last])
    step = pass_of[:, None] * layers + np.arange(layers)
    routed = ids >= 0
    keys = (step[:, :, None] * experts + ids)[routed]
    ranks = np.broadcast_to(np.arange(ids.shape[2]), ids.shape)[routed]
    return _reduce(keys, ranks, mass[routed], experts, weighted)


def _reduce(
    keys: np.ndarray, ranks: np.ndarray, mass: np.ndarray, experts: int, weighted: bool
) -> tuple[np.ndarray, ...]:
    order = np.argsort(keys, kind="stable")
    keys, ranks, mass = keys[order], ranks[order], mass[order]
    heads = np.flatnonzero(np.diff(keys, prepend=-1))
    if not len(heads):
        return (keys,) * 6
    step, expert = np.divmod(keys[heads], experts)
    best, largest = np.minimum.reduceat(ranks, heads), np.maximum.reduceat(mass, heads)
    total, count = np.add.reduceat(mass, heads), np.diff(np.append(heads, len(keys)))
    order = np.lexsort((expert, -largest, step) if weighted else (expert, -count, best, step))
    return tuple(column[order] for column in (step, expert, best, largest, total, count))


def _uses(unit: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Position of the next demand of each entry's expert, and of each expert's first."""
    order = np.argsort(unit, kind="stable")
    same = unit[order[1:]] == unit[order[:-1]]
    next_use = np.full(len(unit), NEVER, np.int64)
    next_use[order[:-1][same]] = order[1:][same]
    first_use = np.full(units, NEVER, np.int64)
    heads = order[np.append(True, ~same)] if len(unit) else order
    first_use[unit[heads]] = heads
    return next_use, first_use
