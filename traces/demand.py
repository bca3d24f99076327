"""Demand of every step: the experts that the pass's tokens use, in demand order, and the next demand of each.

A step is (pass, layer). Demand order is by descending largest gate weight over the pass's tokens, ties by lowest id;
without weights by best rank, then token count, then id. Weights are integers, round(weight * 2**24) half to even.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moereplay.traces import token_arrays
from moereplay.traces.derived import derived
from moereplay.traces.growing import VALUES_AT_ONCE, Growing, Rows, append, tokens_at_once
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Trace
from moereplay.traces.units import NEVER


class Union(NamedTuple):
    """Demand of one step: n experts in demand order, as lists."""

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
    expert: np.ndarray  #: (n,) int16
    rank: np.ndarray  #: (n,) int16
    mass: np.ndarray  #: (n,) int64
    mass_sum: np.ndarray  #: (n,) int64
    tokens: np.ndarray  #: (n,) int32
    next_use: np.ndarray  #: (n,) int64
    first_use: np.ndarray  #: (L * E,) int64: position of the first demand, or NEVER

    def step(self, index: int) -> Union:
        """Return the demand of one step."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Union(*(getattr(self, name)[span].tolist() for name in Union._fields))


def union_of(ids: Sequence[Sequence[int]], mass: Sequence[Sequence[int]]) -> Union:
    """Return a step's demand for chosen ids (T, k) and their weights in UNITs (T, k), or () without weights."""
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


COLUMNS = {
    "offsets": Rows("<i8"),
    "expert": Rows("<i2"),
    "rank": Rows("<i2"),
    "mass": Rows("<i8"),
    "mass_sum": Rows("<i8"),
    "tokens": Rows("<i4"),
    "next_use": Rows("<i8"),
    "first_use": Rows("<i8"),
}


def demand_of(trace: Trace, passes: str) -> Demand:
    """Return the demand of a trace under a schedule; it is derived once and cached."""
    return Demand(**derived(trace, f"demand-{passes}", COLUMNS, lambda arrays: _derive(trace, passes, arrays)))


def next_passes(trace: Trace, passes: str) -> np.ndarray:
    """Return the pass of every entry's next use, or NEVER, (n,) int64."""
    demand = demand_of(trace, passes)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first in range(0, len(demand.next_use), VALUES_AT_ONCE):
            next_use = demand.next_use[first : first + VALUES_AT_ONCE]
            step = np.searchsorted(demand.offsets, next_use, "right") - 1  # offsets of passes would be a copy
            append(arrays["next_pass"], np.where(next_use == NEVER, NEVER, step // trace.geometry.layers))

    return derived(trace, f"coming-{passes}", {"next_pass": Rows("<i8")}, fill)["next_pass"]


class Entries(NamedTuple):
    """Demand of some passes, one entry per (step, expert), (n,) each; steps are counted from the first of them."""

    key: np.ndarray  #: step * E + expert, rising
    rank: np.ndarray
    mass: np.ndarray
    mass_sum: np.ndarray
    tokens: np.ndarray


def _derive(trace: Trace, passes: str, arrays: Mapping[str, Growing]) -> None:
    """Derive the demand of each block of passes forwards, then the next uses backwards."""
    plan, layers = schedule(trace, passes), trace.geometry.layers
    append(arrays["offsets"], np.zeros(1, np.int64))
    blocks = _blocks(plan, tokens_at_once(_choices(trace)))
    for first, last in blocks:
        entries = _in_demand_order(_entries(trace, plan, first, last), trace)
        step, expert = np.divmod(entries.key, trace.geometry.experts)
        counts = np.bincount(step, minlength=(last - first) * layers)
        append(arrays["offsets"], arrays["expert"].rows + np.cumsum(counts))
        append(arrays["expert"], expert)
        for name in ("rank", "mass", "mass_sum", "tokens"):
            append(arrays[name], getattr(entries, name))
    coming = np.full(layers * trace.geometry.experts, NEVER, np.int64)
    for first, last in reversed(blocks):
        _put_uses(trace, first * layers, last * layers, arrays, coming)
    append(arrays["first_use"], coming)


def _blocks(plan: Passes, tokens: int) -> list[tuple[int, int]]:
    """Return ranges of whole passes, each of about `tokens` rows."""
    edges = np.unique(np.searchsorted(plan.start, np.arange(tokens, int(plan.stop[-1]), tokens)))
    bounds = [0, *(edge for edge in edges.tolist() if 0 < edge < len(plan)), len(plan)]
    return list(itertools.pairwise(bounds))


def _entries(trace: Trace, plan: Passes, first: int, last: int) -> Entries:
    """Return the entries of passes [first, last), read in pieces because a pass may be longer than a block."""
    begin, end, most = int(plan.start[first]), int(plan.stop[last - 1]), 2 * tokens_at_once(_choices(trace))
    found = None
    for start in range(begin, end, most):
        piece = _merged(_of_rows(trace, plan, first, start, min(start + most, end)))
        found = piece if found is None else _merged(Entries(*map(np.concatenate, zip(found, piece, strict=True))))
    assert found is not None  # a block has a pass, and a pass a row
    return found


def _choices(trace: Trace) -> int:
    return trace.geometry.layers * trace.geometry.k


def _of_rows(trace: Trace, plan: Passes, first: int, start: int, stop: int) -> Entries:
    """Return every choice of rows [start, stop); steps are counted from pass `first`."""
    tokens = plan.tokens(start, stop)
    ids = _read(trace, "chosen", tokens).astype(np.int64)
    mass = to_units(_read(trace, "weights", tokens)) if "weights" in trace.arrays else np.zeros_like(ids)
    layers, experts = trace.geometry.layers, trace.geometry.experts
    pass_of = np.searchsorted(plan.start, np.arange(start, stop), "right") - 1 - first
    step = pass_of[:, None] * layers + np.arange(layers)
    routed = ids >= 0
    key, mass = (step[:, :, None] * experts + ids)[routed], mass[routed]
    rank = np.broadcast_to(np.arange(ids.shape[2]), ids.shape)[routed]
    return Entries(key, rank, mass, mass, np.ones(len(key), np.int64))


def _read(trace: Trace, name: str, tokens: slice | np.ndarray) -> np.ndarray:
    """Read an array's rows; scattered tokens come from the mapped file, because chunks are slow to read one by one."""
    if isinstance(tokens, slice):
        return trace.read(name, tokens.start, tokens.stop)
    return token_arrays.rows(trace, name)[tokens]


def _merged(choices: Entries) -> Entries:
    """Merge choices of the same step and expert."""
    order = np.argsort(choices.key, kind="stable")
    key, rank, mass, mass_sum, tokens = (column[order] for column in choices)
    heads = np.flatnonzero(np.diff(key, prepend=-1))
    if not len(heads):
        return choices
    best, largest = np.minimum.reduceat(rank, heads), np.maximum.reduceat(mass, heads)
    return Entries(key[heads], best, largest, np.add.reduceat(mass_sum, heads), np.add.reduceat(tokens, heads))


def _in_demand_order(entries: Entries, trace: Trace) -> Entries:
    step = entries.key // trace.geometry.experts
    if "weights" in trace.arrays:
        order = _by_step_then_largest(step, entries.mass)
    else:
        order = np.lexsort((-entries.tokens, entries.rank, step))  # stable, so ties stay by expert
    return Entries(*(column[order] for column in entries))


def _by_step_then_largest(step: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return a stable order; both keys packed into one integer, if they fit, sort ten times faster."""
    span = int(mass.max(initial=0)) + 1
    if int(mass.min(initial=0)) < 0 or (int(step.max(initial=0)) + 1) * span >= 1 << 63:
        return np.lexsort((-mass, step))
    return np.argsort(step * span + (span - 1 - mass), kind="stable")


def _put_uses(trace: Trace, first: int, last: int, arrays: Mapping[str, Growing], coming: np.ndarray) -> None:
    """Write the next uses of steps [first, last); `coming` holds each expert's first demand after them."""
    layers, experts = trace.geometry.layers, trace.geometry.experts
    offsets = arrays["offsets"].read(first, last + 1)
    begin, end = int(offsets[0]), int(offsets[-1])
    layer = np.repeat(np.arange(first, last) % layers, np.diff(offsets))
    unit = layer * experts + arrays["expert"].read(begin, end)
    arrays["next_use"].put(begin, _next_uses(unit, begin, coming))


def _next_uses(unit: np.ndarray, begin: int, coming: np.ndarray) -> np.ndarray:
    """Return the position of the next entry of each unit, and write the first positions to `coming`."""
    narrow = unit.astype(np.uint16) if len(coming) <= 1 << 16 else unit  # sorts five times faster
    order = np.argsort(narrow, kind="stable")
    ordered = unit[order]
    is_last = np.diff(ordered, append=-1) != 0
    later = np.roll(order, -1) + begin
    next_use = np.empty(len(unit), np.int64)
    next_use[order] = np.where(is_last, coming[ordered], later)
    is_first = np.diff(ordered, prepend=-1) != 0
    coming[ordered[is_first]] = order[is_first] + begin
    return next_use
