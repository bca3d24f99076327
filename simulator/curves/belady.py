"""Belady at every capacity, for experts of equal bytes: a priority stack, of which a cache of C holds the top C.

A step's demand D goes on top. At capacity C its misses push out the last of what else is there, so going down the
stack as many are carried as D has members further down or absent: at each place the best of the carried, and of what
is found there, stays, and the others are carried on. Better is a nearer next use, then a lower id.

Relaxed, a cache of C keeps the best C of what it held and of D, so D does not go on top: it is what is carried down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.stream import NOWHERE, Cut, Demands, Tally, spans
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import fast

GONE = 1 << 62  #: the key of a place whose expert has been taken out; worse than any other


class Stack(NamedTuple):
    """A row per pool, best first. A key is next use << bits | id, so that one comparison also settles ties."""

    key: np.ndarray  #: (pools, units) int64
    place: np.ndarray  #: (pools, units) int32: of each expert, or NOWHERE
    size: np.ndarray  #: (pools,) int64
    top: np.ndarray  #: (pools,) int64: how many the pool's last step demanded; they lie on top
    carried: np.ndarray  #: (experts,) int64: keys, GONE where nothing is carried


@fast
def _doubt(top, together, nearest, undecided):
    """Mark capacities at which the pool's last step did not fit, so that times decide which experts remain.

    That matters unless this step does not fit either, so that all of them are evicted, and uses none of them.
    """
    low = 1 if nearest < top else together
    if low < top:
        undecided[low - 1] += 1
        undecided[top - 1] -= 1


@fast
def _exchange(carried, together, best, other):
    """Put `other` in place of the best carried expert; return the new best."""
    least = GONE
    for n in range(together):
        key = other if carried[n] == best else carried[n]
        carried[n] = key
        least = min(least, key)
    return least


@fast
def _carry_down(key, place, carried, together, first, last, size, bits):
    """Carry the members of a group through the positions [first, last); return the stack's new size.

    Experts still carried at the end, because one of the group was absent, go below the last of `size`.
    """
    ids, best = (1 << bits) - 1, GONE
    for n in range(together):
        best = min(best, carried[n])
    for at in range(first, last):
        found = key[at]
        if found >= best:
            key[at], place[best & ids] = best, at
            best = _exchange(carried, together, best, found)
    end = size
    while best < GONE:
        key[end], place[best & ids] = best, end
        best = _exchange(carried, together, best, GONE)
        end += 1
    return end


@fast
def _take_out(expert, group, together, base, key, place, found):
    """Count each member of a group in the unchanged stack.

    Return the nearest position, the group's depth, and whether one was absent.
    """
    nearest, deepest, absent = len(key), 0, False
    for at in range(group, group + together):
        own = place[base + np.int64(expert[at])]
        if own < 0:
            found[len(found) - 1] += 1
            absent = True
        else:
            found[own] += 1
            key[own] = GONE
            nearest, deepest = min(nearest, own), max(deepest, own + 1)
    return nearest, len(key) if absent else deepest, absent


def _walk(demands, first, last, cut, bits, relaxed, stack, into):
    """Walk steps [first, last): take a group out, then put it on top, or carry it down."""
    never = np.int64(1) << (61 - bits)  # numpy's, as plain Python would not add it to an int32
    carried = stack.carried
    for step in range(first, last):
        layer = step % cut.layers
        if layer == 0 and demands.fresh[step // cut.layers]:
            stack.place[:], stack.size[:], stack.top[:] = NOWHERE, 0, 0
        pool, base = (layer, 0) if cut.per_layer else (0, layer * cut.experts)
        key, place, found = stack.key[pool], stack.place[pool], into.found[layer]
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together, largest = stop - begin if cut.atomic else 1, 0
        for group in range(begin, stop, max(1, together)):
            size = stack.size[pool]
            nearest, deepest, absent = _take_out(demands.expert, group, together, base, key, place, found)
            largest = max(largest, len(found) - 1 if absent else deepest - 1)
            for n in range(together):
                x = base + np.int64(demands.expert[group + n])
                own = min(demands.next_use[group + n], never) << bits | x
                if relaxed:
                    carried[n] = own
                else:
                    carried[n] = key[n] if n < size else GONE
                    key[n], place[x] = own, n
            top = 0 if relaxed else together
            if not relaxed:
                _doubt(stack.top[pool], together, nearest, into.undecided)
            stack.top[pool] = top
            last_place = min(deepest, size)
            stack.size[pool] = _carry_down(key, place, carried, together, top, last_place, max(top, size), bits)
        into.complete[layer, largest] += 1 if stop > begin else 0


WALK = compiled(_walk)


def count(demands: Demands, cut: Cut, relaxed: bool, into: Tally, done: Callable[[int], None]) -> None:
    """Count the whole stream into `into`, whose grid must be 1, 2, ... experts; `done` takes numbers of steps."""
    key, place = np.zeros((cut.pools, cut.units), np.int64), np.full((cut.pools, cut.units), NOWHERE, np.int32)
    sizes = np.zeros(cut.pools, np.int64), np.zeros(cut.pools, np.int64)
    stack = Stack(key, place, *sizes, np.zeros(cut.experts, np.int64))
    for first, last in spans(demands, done):
        WALK(demands, first, last, cut, cut.units.bit_length(), relaxed, stack, into)
