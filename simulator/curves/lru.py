"""LRU at every capacity: how deep each demanded expert lies in the stack of last uses, in experts or in bytes.

The stack is a time line, oldest first: a slot holds the weight of the expert whose last use it is, or 0. An expert's
depth is the weight from its slot onwards: that of its own block, added up, and `above` for all later blocks. Both loops
run over whole blocks and mask what does not count: a fixed length costs less than a mispredicted end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import int32, int64, njit, types, void

from simulator.compiled.cache import compile_kept
from simulator.curves.stream import CUT, DEMANDS, FIRST_USE, NOWHERE, TALLY, Cut, Demands, Tally, spans

Rows = np.ndarray


class Stack(NamedTuple):
    """The time lines, a row per pool."""

    weight: Rows  #: (pools, slots) int64
    above: Rows  #: (pools, blocks) int64: weight of all later blocks
    owner: Rows  #: (pools, slots) int32: the expert
    slot: Rows  #: (pools, units) int32: of each expert, or NOWHERE
    end: Rows  #: (pools,) int64: the next free slot
    depth: Rows  #: (experts,) int64: of a group that is being looked up


STACK = types.NamedTuple((int64[:, ::1], int64[:, ::1], int32[:, ::1], int32[:, ::1], int64[::1], int64[::1]), Stack)
WALK = void(DEMANDS, int64, int64, CUT, int64[::1], int64, STACK, TALLY)


@njit(inline="always", error_model="numpy")  # inlined before optimisation, or arrays are counted at every call
def _measure(expert, group, stop, base, weight, above, slot, shift, depth):
    """The depth of each of a group in the stack as it is."""
    for at in range(group, stop):
        own = slot[base + expert[at]]
        if own < 0:
            depth[at - group] = FIRST_USE
            continue
        block = own >> shift
        total, start = above[block], block << shift
        for n in range(1 << shift):
            total += weight[start + n] if start + n >= own else 0
        depth[at - group] = total


@njit(inline="always", error_model="numpy")
def _bucket(grid, capacities, depth):
    """The smallest capacity that holds `depth`: its place in the grid, or how many there are."""
    return min(depth - 1, capacities) if len(grid) == 0 else np.searchsorted(grid, depth)


@njit(inline="always", error_model="numpy")
def _count(depth, together, heavy, found, grid, undecided):
    """Count a group, and the capacities at which times decide what it leaves behind.

    At a capacity below the group's weight its own experts push each other out as they are computed, hits first. That is
    demand order, LRU's own, unless one that misses comes right before one that hits.
    """
    capacities, whole, before = len(found) - 2, heavy * together, 0
    for n in range(together):
        bucket = capacities + 1 if depth[n] == FIRST_USE else _bucket(grid, capacities, depth[n])
        found[bucket] += 1
        if depth[n] < min(before, whole):
            undecided[bucket] += 1
            undecided[_bucket(grid, capacities, min(before, whole))] -= 1
        before = depth[n]


@njit(inline="always", error_model="numpy")
def _close_gaps(weight, above, owner, slot, end, shift):
    """Push all uses together at the beginning of the time line; returns its new end."""
    kept = total = 0
    for at in range(end):
        heavy = weight[at]
        if heavy > 0:
            weight[at] = 0
            weight[kept], owner[kept] = heavy, owner[at]
            slot[owner[kept]] = kept
            kept += 1
    for block in range(len(above) - 1, -1, -1):
        above[block] = total
        for n in range(1 << shift):
            total += weight[(block << shift) + n]
    return kept


@njit(inline="always", error_model="numpy")
def _move_to_top(expert, group, stop, base, weight, above, owner, slot, end, heavy, shift):
    """Use a group in demand order; returns the new end of the time line."""
    for at in range(group, stop):
        x = base + expert[at]
        old, first = slot[x], 0
        if old >= 0:
            weight[old], first = 0, old >> shift
        last = end >> shift
        for block in range(len(above)):
            above[block] += heavy if block >= first and block < last else 0
        weight[end], owner[end], slot[x] = heavy, x, end
        end += 1
    return end


def _walk(demands, first, last, cut, weights, shift, stack, into):
    """Steps [first, last): look all of a group up, then move it to the top."""
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            stack.weight[:], stack.above[:], stack.slot[:], stack.end[:] = 0, 0, NOWHERE, 0
        pool, base, heavy = layer if cut.per_layer else 0, 0 if cut.per_layer else layer * cut.experts, weights[layer]
        weight, above, owner, slot = stack.weight[pool], stack.above[pool], stack.owner[pool], stack.slot[pool]
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together = stop - begin if cut.atomic else 1
        for group in range(begin, stop, max(1, together)):
            after, end = group + together, stack.end[pool]
            _measure(demands.expert, group, after, base, weight, above, slot, shift, stack.depth)
            _count(stack.depth, together, heavy, into.found[layer], into.grid, into.undecided)
            if end + together > len(weight):
                end = _close_gaps(weight, above, owner, slot, end, shift)
            end = _move_to_top(demands.expert, group, after, base, weight, above, owner, slot, end, heavy, shift)
            stack.end[pool] = end


def _empty(cut: Cut) -> tuple[Stack, int]:
    """Two slots per expert, so that closing the gaps is rare, in blocks of about their square root."""
    shift = max(3, round(np.log2(2 * cut.units) / 2))
    blocks = -(-2 * cut.units >> shift)
    pools, slots = cut.pools, blocks << shift
    above, slot = np.zeros((pools, blocks), np.int64), np.full((pools, cut.units), NOWHERE, np.int32)
    line = np.zeros((pools, slots), np.int64), above, np.zeros((pools, slots), np.int32), slot
    return Stack(*line, np.zeros(pools, np.int64), np.zeros(cut.experts, np.int64)), shift


@cache
def _walk_compiled():
    return compile_kept(WALK, _walk, nogil=True, error_model="numpy")


def count(demands: Demands, cut: Cut, weights: np.ndarray, into: Tally, done: Callable[[int], None]) -> None:
    """Count the whole stream into `into`; `weights` (L,) int64: of an expert, by layer; `done` hears of steps."""
    walk, (stack, shift) = _walk_compiled(), _empty(cut)
    for first, last in spans(demands, done):
        walk(demands, first, last, cut, weights, shift, stack, into)
