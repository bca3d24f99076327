"""LRU at every capacity: the depth of each demanded expert in the stack of last uses, in experts or in bytes.

The stack is a time line, oldest first: a slot is used if it is some expert's last use. An expert's depth is the weight
of all slots from its own onwards: those of its block, of the later blocks of its group, and of the later groups. Where
every expert weighs 1, a block's slots are the bits of a word. Loops run over whole groups and mask what does not count:
a fixed length costs less than a mispredicted end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.stream import FIRST_USE, NOWHERE, Cut, Demands, Tally, spans
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import bit_count, fast

#: log2 of the slots of a block, and of the blocks of a group.
BLOCK, GROUP = 6, 6
SLOTS_PER_EXPERT = 4  #: so that closing the gaps is rare
ONE, ALL = np.int64(1), np.int64(-1)

Rows = np.ndarray


class Stack(NamedTuple):
    """The time lines, a row per pool."""

    used: Rows  #: (pools, blocks) int64: a bit per slot
    block: Rows  #: (pools, blocks) int64: weight
    group: Rows  #: (pools, groups) int64: weight
    weight: Rows  #: (pools, slots) int64; (pools, 0) where every expert weighs 1
    owner: Rows  #: (pools, slots) int32: the expert
    slot: Rows  #: (pools, units) int32: of each expert, or NOWHERE
    end: Rows  #: (pools,) int64: the next free slot
    depth: Rows  #: (experts,) int64: of experts that are being looked up


class TimeLine(NamedTuple):
    """The time line of one pool, with the columns of `Stack`."""

    used: Rows
    block: Rows
    group: Rows
    weight: Rows
    owner: Rows
    slot: Rows


@fast
def _measure(line, expert, first, stop, base, depth):
    """Return the depth in the present stack of each expert that is looked up together."""
    for at in range(first, stop):
        own = line.slot[base + np.int64(expert[at])]
        if own < 0:
            depth[at - first] = FIRST_USE
            continue
        mine, ours, total = own >> BLOCK, own >> BLOCK + GROUP, np.int64(0)
        if len(line.weight) == 0:
            total += bit_count(line.used[mine] & (ALL << (own & ((1 << BLOCK) - 1))))
        else:
            for n in range(1 << BLOCK):
                total += line.weight[(mine << BLOCK) + n] if (mine << BLOCK) + n >= own else 0
        for n in range(1 << GROUP):
            total += line.block[(ours << GROUP) + n] if (ours << GROUP) + n > mine else 0
        for n in range(len(line.group)):
            total += line.group[n] if n > ours else 0
        depth[at - first] = total


@fast
def _flip(line, at, heavy):
    """Mark a slot as used, or as unused with a negative weight."""
    mine = at >> BLOCK
    line.used[mine] ^= ONE << (at & ((1 << BLOCK) - 1))
    line.block[mine] += heavy
    line.group[mine >> GROUP] += heavy


@fast
def _bucket(grid, capacities, depth):
    """Return the index of the smallest capacity that holds `depth`, or the number of capacities."""
    return min(depth - 1, capacities) if len(grid) == 0 else np.searchsorted(grid, depth)


@fast
def _count(depth, together, whole, found, grid, undecided):
    """Count demands that are looked up together, of `whole` weight, and the capacities at which times decide what they
    leave.

    Return the largest index of them, from which on all hit.
    At a capacity below their weight their own experts push each other out as they are computed, hits first. That is
    demand order, LRU's own, unless one that misses comes right before one that hits.
    """
    capacities, before, largest = len(found) - 2, 0, 0
    for n in range(together):
        bucket = capacities + 1 if depth[n] == FIRST_USE else _bucket(grid, capacities, depth[n])
        found[bucket] += 1
        largest = max(largest, bucket)
        if depth[n] < min(before, whole):
            undecided[bucket] += 1
            undecided[_bucket(grid, capacities, min(before, whole))] -= 1
        before = depth[n]
    return largest


@fast
def _close_gaps(line, end):
    """Move all uses to the beginning of the time line; return its new end."""
    kept = 0
    for at in range(end):
        if line.used[at >> BLOCK] >> (at & ((1 << BLOCK) - 1)) & 1:
            x = line.owner[at]
            line.owner[kept], line.slot[x] = x, kept
            if len(line.weight) > 0:
                line.weight[kept] = line.weight[at]
            kept += 1
    line.used[:], line.block[:], line.group[:], line.weight[kept:] = 0, 0, 0, 0
    for at in range(kept):
        _flip(line, at, line.weight[at] if len(line.weight) > 0 else 1)
    return kept


@fast
def _weight(line, expert, at, weights, at_weights):
    """Return the weight of a demanded expert of the layer whose weights begin there."""
    return weights[at_weights + np.int64(expert[at])] if len(line.weight) > 0 else ONE


@fast
def _move_to_top(line, expert, first, stop, base, end, weights, at_weights):
    """Use in demand order the experts that were looked up together; return the new end of the time line."""
    for at in range(first, stop):
        x = base + np.int64(expert[at])
        old, heavy = line.slot[x], _weight(line, expert, at, weights, at_weights)
        if old >= 0:
            _flip(line, old, -heavy)
            if len(line.weight) > 0:
                line.weight[old] = 0
        _flip(line, end, heavy)
        if len(line.weight) > 0:
            line.weight[end] = heavy
        line.owner[end], line.slot[x] = x, end
        end += 1
    return end


def _walk(demands, first, last, cut, weights, stack, into):
    """Walk steps [first, last): look up all that is looked up together, then move it to the top."""
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            stack.used[:], stack.block[:], stack.group[:], stack.weight[:] = 0, 0, 0, 0
            stack.slot[:], stack.end[:] = NOWHERE, 0
        mine = layer * cut.experts
        pool, base = layer if cut.per_layer else 0, 0 if cut.per_layer else mine
        used, block, group = stack.used[pool], stack.block[pool], stack.group[pool]
        line = TimeLine(used, block, group, stack.weight[pool], stack.owner[pool], stack.slot[pool])
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together, largest = stop - begin if cut.atomic else 1, 0
        for here in range(begin, stop, max(1, together)):
            after, end, whole = here + together, stack.end[pool], np.int64(together)
            if len(line.weight) > 0:
                whole = np.int64(0)
                for at in range(here, after):
                    whole += _weight(line, demands.expert, at, weights, mine)
            _measure(line, demands.expert, here, after, base, stack.depth)
            largest = max(largest, _count(stack.depth, together, whole, into.found[layer], into.grid, into.undecided))
            if end + together > len(line.owner):
                end = _close_gaps(line, end)
            stack.end[pool] = _move_to_top(line, demands.expert, here, after, base, end, weights, mine)
        into.complete[layer, largest] += 1 if stop > begin else 0


def _empty(cut: Cut, equal: bool) -> Stack:
    groups = -(-SLOTS_PER_EXPERT * cut.units >> BLOCK + GROUP)
    blocks, slots = groups << GROUP, groups << BLOCK + GROUP
    owner, slot = np.zeros((cut.pools, slots), np.int32), np.full((cut.pools, cut.units), NOWHERE, np.int32)
    end, depth = np.zeros(cut.pools, np.int64), np.zeros(cut.experts, np.int64)

    def numbers(length: int) -> np.ndarray:
        return np.zeros((cut.pools, length), np.int64)

    weight = numbers(0 if equal else slots)
    return Stack(numbers(blocks), numbers(blocks), numbers(groups), weight, owner, slot, end, depth)


WALK = compiled(_walk)


def count(demands: Demands, cut: Cut, weights: np.ndarray, into: Tally, done: Callable[[int], None]) -> None:
    """Count the whole stream into `into`; `weights` (L * E,) int64, of every expert; `done` takes numbers of steps."""
    stack = _empty(cut, bool((weights == 1).all()))
    for first, last in spans(demands, done):
        WALK(demands, first, last, cut, weights, stack, into)
