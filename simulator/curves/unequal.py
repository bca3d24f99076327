"""The most hits at one capacity where experts of a pool differ in bytes: a limit that no eviction exceeds, and a way.

Choosing stays (`stream.py`) that fit every place's room is an integer program (FOO, Berger, Beckmann, Harchol-Balter,
SIGMETRICS 2018). Its optimum is bracketed:

- *Limit.* Give a byte on each place a price of at least 0. Whatever is chosen, a stay of s bytes over places of prices
  p has 1 <= max(0, 1 - s * sum(p)) + s * sum(p), and what the chosen ones pay is at most sum(room * p). So no choice
  has more hits than sum(room * p) + sum over all stays of max(0, 1 - s * sum(p)), at any prices. One price everywhere
  is PFOO-U. Prices then climb where more bytes want to stay than there is room, and fall elsewhere.
- *Way.* In the order of time, where what stays exceeds the room, that whose bytes would still pay most until their next
  use leave. With one price everywhere these are the largest bytes x time; of equal bytes, the farthest next use.

Climbing is in floats, by + - * / and square roots alone; the limit at the best prices is then counted in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from operator import mul
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.stream import Cut, Demands, Stays, of_every, rise, sink, stays_of
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called
from moereplay.simulator.threads import check_stop

COUNTED = 10**8  #: stays to look at in all turns together
AT_ONCE = 10**6  #: in a call of the kernel, between which it may be stopped
LEAST_TURNS, MOST_TURNS = 60, 300
STEP, LAST_STEP = 0.3, 0.015  #: of a price in one turn, at first and at last
BLUR, LAST_BLUR = 1.0, 0.02  #: the range of worth, in hits, over which a stay goes from left out to chosen
MOMENTUM, MEMORY = 0.9, 0.99  #: of the direction, and of its mean square
FINEST = 50  #: bits of a price that is worth a goal, at most


class Bracket(NamedTuple):
    """Bounds on a number that is not known: it lies between both, and a way that knows the future reaches one end."""

    at_least: int
    at_most: int


class Goals(NamedTuple):
    """What counts 1 each if all of its stays are chosen: a hit has one, a complete step those of all its experts."""

    first: np.ndarray  #: (m + 1,) int64: the first stay of each
    begin: np.ndarray  #: (n,): the first place of each stay
    end: np.ndarray  #: (n,): the place after the last
    size: np.ndarray  #: (n,) int64
    room: np.ndarray  #: (P,) int64
    single: bool  #: each has one stay


class Prices(NamedTuple):
    """Prices of a byte at each of P places, in goals, and their inputs."""

    each: np.ndarray  #: (P,) f64
    until: np.ndarray  #: (P + 1,) f64: the sum over the places before
    wanted: np.ndarray  #: (P,) f64: bytes of the stays that are chosen at these prices
    way: np.ndarray  #: (P,) f64: the mean of the last directions
    square: np.ndarray  #: (P,) f64: the mean of their squares


# ---------------------------------------------------------------- the limit


@called
def _choose_several(goals, prices, blur, total):
    """Choose goals at these prices; return the limit, `total` without them."""
    for goal in range(len(goals.first) - 1):
        worth = 1.0
        for n in range(goals.first[goal], goals.first[goal + 1]):
            worth -= goals.size[n] * (prices.until[goals.end[n]] - prices.until[goals.begin[n]])
        total += max(0.0, worth)
        share = min(1.0, worth / blur + 0.5)
        if share > 0.0:
            for n in range(goals.first[goal], goals.first[goal + 1]):
                prices.wanted[goals.begin[n]] += share * goals.size[n]
                prices.wanted[goals.end[n]] -= share * goals.size[n]
    return total


@called
def _choose_stays(goals, prices, blur, total):
    """Choose goals of one stay each, which takes two thirds of the time of `_choose_several`."""
    for n in range(len(goals.size)):
        size, begin, end = goals.size[n], goals.begin[n], goals.end[n]
        worth = 1.0 - size * (prices.until[end] - prices.until[begin])
        total += max(0.0, worth)
        share = min(1.0, worth / blur + 0.5)
        if share > 0.0:
            prices.wanted[begin] += share * size
            prices.wanted[end] -= share * size
    return total


@called
def _weigh(goals, prices, blur):
    """Return the limit at these prices, and sum up the bytes of the goals that are chosen at them."""
    total = 0.0
    for place in range(len(goals.room)):
        prices.until[place + 1] = prices.until[place] + prices.each[place]
        total += prices.each[place] * goals.room[place]
        prices.wanted[place] = 0.0
    single = goals.single
    total = _choose_stays(goals, prices, blur, total) if single else _choose_several(goals, prices, blur, total)
    for place in range(1, len(goals.room)):
        prices.wanted[place] += prices.wanted[place - 1]
    return total


@called
def _move(goals, prices, step, pool):
    """Move all prices by a share of at most `step`."""
    for place in range(len(goals.room)):
        over = (prices.wanted[place] - goals.room[place]) / pool
        prices.way[place] = MOMENTUM * prices.way[place] + (1.0 - MOMENTUM) * over
        prices.square[place] = MEMORY * prices.square[place] + (1.0 - MEMORY) * over * over
        moved = step * prices.way[place] / (np.sqrt(prices.square[place]) + 1e-9)
        half = 0.5 * min(1.0, max(-1.0, moved))
        prices.each[place] *= (1.0 + half) / (1.0 - half)


def _climb(goals, prices, paces, best, lowest, pool):
    """Take a turn for each (blur, step); `best` are the prices of the lowest limit so far, `lowest`."""
    for turn in range(len(paces)):
        limit = _weigh(goals, prices, paces[turn, 0])
        if limit < lowest[0]:
            lowest[0] = limit
            for place in range(len(best)):
                best[place] = prices.each[place]
        _move(goals, prices, paces[turn, 1], pool)


def _count(goals, whole, until, bits, told):
    """Add up what goals are worth at integer prices, in `told`: the upper bits, and the 26 lower ones."""
    one, mask = np.int64(1) << bits, (np.int64(1) << 26) - 1
    for place in range(len(whole)):
        until[place + 1] = until[place] + whole[place]
    for goal in range(len(goals.first) - 1):
        worth = one
        for n in range(goals.first[goal], goals.first[goal + 1]):
            paid, size = until[goals.end[n]] - until[goals.begin[n]], goals.size[n]
            # beyond, the product, which may not fit 64 bits, is more than a goal
            worth = max(np.int64(0), worth - size * paid) if paid <= one // size else np.int64(0)
        told[0] += worth >> 26
        told[1] += worth & mask


CLIMB, COUNT = compiled(_climb), compiled(_count)


def best_prices(goals: Goals, pool: int) -> np.ndarray:
    """Return the prices with the lowest limit of all that were tried, (P,) f64; `pool` is the room of a place."""
    prices, best, lowest = _begun(goals), np.zeros(len(goals.room)), np.full(1, np.inf)
    paces, turns = _paces(len(goals.size)), max(1, AT_ONCE // len(goals.size))
    for first in range(0, len(paces), turns):
        check_stop()
        CLIMB(goals, prices, paces[first : first + turns], best, lowest, pool)
    return best


def _begun(goals: Goals) -> Prices:
    """Return the best uniform price: choose the goals with the fewest bytes x places that fit in all room."""
    areas = np.concatenate([[0], np.cumsum(goals.size * (goals.end - goals.begin))])[goals.first]
    area = np.sort(np.diff(areas)).astype(np.float64)
    first_out = int(np.searchsorted(np.cumsum(area), goals.room.sum(dtype=np.float64), "right"))
    places = len(goals.room)
    price = 1.0 / max(1.0, area[min(first_out, len(area) - 1)])
    return Prices(np.full(places, price), np.zeros(places + 1), *(np.zeros(places) for _ in range(3)))


def _paces(stays: int) -> np.ndarray:
    """Return blur and step of each turn, both falling, (turns, 2) f64."""
    turns = min(MOST_TURNS, max(LEAST_TURNS, COUNTED // stays))
    done = np.arange(turns) / turns
    return np.stack([BLUR / (1 + (BLUR / LAST_BLUR - 1) * done), STEP + (LAST_STEP - STEP) * done], axis=1)


def in_integers(goals: Goals, prices: np.ndarray, bits: int = FINEST) -> int:
    """Return the limit at these prices, rounded down: it holds for integer prices just as well.

    A price that is worth a goal has `bits` at most.
    """
    prices = np.minimum(prices, 1.0)  # of a goal: what costs that is not chosen anyway
    bits = min(bits, 61 - int(prices.sum()).bit_length())
    whole = np.rint(prices * (1 << bits)).astype(np.int64)
    told = np.zeros(2, np.int64)
    COUNT(goals, whole, np.zeros(len(whole) + 1, np.int64), bits, told)
    upper, lower = told.tolist()
    room = sum(map(mul, goals.room.tolist(), whole.tolist()))  # may not fit 64 bits
    return (upper << 26) + lower + room >> bits


# ---------------------------------------------------------------- the way


class Kept(NamedTuple):
    """Stays at a place, by size. A key is the end of a stay << 32 | the stay."""

    sizes: np.ndarray  #: (K,) int64
    of: np.ndarray  #: (n,) int32: the size of each stay, as its place in `sizes`
    heap: np.ndarray  #: (K, room) int64: keys, the farthest end first; some have ended
    entries: np.ndarray  #: (K,) int64: of the heap
    leaves: np.ndarray  #: (P + 1,) int64: bytes of those that end there
    told: np.ndarray  #: (1,) int64: stays that were given up


@called
def _forget_ended(kept, kind, place):
    """Make space in a heap: keep the entries that have not ended."""
    heap, many = kept.heap[kind], 0
    for at in range(kept.entries[kind]):
        if heap[at] >> 32 > place:
            heap[many] = heap[at]
            rise(heap, many)
            many += 1
    kept.entries[kind] = many


@called
def _add(stays, kept, n, place):
    kind = kept.of[n]
    if kept.entries[kind] == kept.heap.shape[1]:
        _forget_ended(kept, kind, place)
    kept.heap[kind, kept.entries[kind]] = np.int64(stays.end[n]) << 32 | n
    rise(kept.heap[kind], kept.entries[kind])
    kept.entries[kind] += 1
    kept.leaves[stays.end[n]] += kept.sizes[kind]


@called
def _give_up(kept, until, place):
    """Give up the stay whose bytes would pay most from here on; return its bytes."""
    most, chosen = -1.0, 0
    for kind in range(len(kept.sizes)):
        if kept.entries[kind] > 0:
            end = kept.heap[kind, 0] >> 32
            if end > place and kept.sizes[kind] * (until[end] - until[place]) > most:
                most, chosen = kept.sizes[kind] * (until[end] - until[place]), kind
    heap, end = kept.heap[chosen], kept.heap[chosen, 0] >> 32
    kept.entries[chosen] -= 1
    heap[0] = heap[kept.entries[chosen]]
    sink(heap, kept.entries[chosen])
    kept.leaves[end] -= kept.sizes[chosen]
    kept.told[0] += 1
    return kept.sizes[chosen]


def _pass_by(stays, until, kept):
    """Go from place to place; `until` are the prices, summed up."""
    n, held = 0, np.int64(0)
    for place in range(len(stays.room)):
        held -= kept.leaves[place]
        while n < len(stays.size) and stays.begin[n] == place:
            _add(stays, kept, n, place)
            held += stays.size[n]
            n += 1
        while held > stays.room[place]:
            held -= _give_up(kept, until, place)


PASS_BY = compiled(_pass_by)


def _reached(stays: Stays, prices: np.ndarray, experts: int) -> int:
    """Return the hits of the way at these prices; at most so many experts have the same size."""
    sizes, of = np.unique(stays.size, return_inverse=True)
    heap = np.zeros((len(sizes), 2 * experts + 1), np.int64)
    leaves, told = np.zeros(len(stays.room) + 1, np.int64), np.zeros(1, np.int64)
    kept = Kept(sizes, of.astype(np.int32), heap, np.zeros(len(sizes), np.int64), leaves, told)
    PASS_BY(stays, np.concatenate([[0.0], np.cumsum(prices)]), kept)
    return stays.always + len(stays.size) - int(told[0])


# ---------------------------------------------------------------- both


def most_hits(
    demands: Demands, cut: Cut, sizes: Sequence[int], pool: int, forced: bool, warm: Sequence[int] = ()
) -> Bracket:
    """Bracket the most hits in one pool of all layers.

    `sizes`, `pool` and `warm` as in `stays_of`.
    """
    unit = gcd(*sizes)  # nothing else fits in the rest
    stays = stays_of(demands, cut, [size // unit for size in sizes], pool // unit, forced, warm)
    if not len(stays.size):
        return Bracket(stays.always, stays.always)
    hits = Goals(np.arange(len(stays.size) + 1), stays.begin, stays.end, stays.size, stays.room, single=True)
    best = best_prices(hits, pool // unit)
    at_most = stays.always + min(in_integers(hits, best), len(stays.size))
    alike = int(np.unique(of_every(sizes, cut), return_counts=True)[1].max())
    reached = (_reached(stays, prices, alike) for prices in (best, np.ones(len(best))))
    return Bracket(max(reached), at_most)
