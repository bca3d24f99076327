"""The most complete steps at one capacity: a limit that no eviction without prefetch exceeds.

A step is complete if the stays (`stream.py`) of all its experts are chosen; a step with a first use never is. Choosing
steps whose stays fit every place's room is an integer program. As for hits (`unequal.py`), a byte on each place has a
price of at least 0, and for any choice there are no more complete steps than the price of all room plus, for every
step, what is left of 1 after paying for its stays, where that is positive. Places are those of the relaxed rules: what
lies between two look-ups, with room for a pool. So the limit holds for evictions that admit every miss, too.

The limit is that of steps in fractions, at the best prices found, and need not be reached. A way that knows the future
takes steps in the order of what is left of them at these prices, each if its stays still fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves.stream import NOWHERE, Cut, Demands, of_every, step_bytes
from moereplay.simulator.curves.unequal import AT_ONCE, Bracket, Prices, move, paces_of
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called
from moereplay.simulator.threads import check_stop

BITS = 40  #: of a price that is worth a step


class Steps(NamedTuple):
    """The n stays of the m steps that may be complete, over P places."""

    first: np.ndarray  #: (m + 1,) int64: the first stay of each step
    begin: np.ndarray  #: (n,) int64: the first place
    end: np.ndarray  #: (n,) int64: the place after the last
    size: np.ndarray  #: (n,) int64
    room: np.ndarray  #: (P,) int64


@called
def _weigh(steps, prices, blur):
    """Return the limit at these prices, and sum up what the steps that are chosen at them keep."""
    total = 0.0
    for place in range(len(steps.room)):
        prices.until[place + 1] = prices.until[place] + prices.each[place]
        total += prices.each[place] * steps.room[place]
        prices.wanted[place] = 0.0
    for step in range(len(steps.first) - 1):
        worth = 1.0
        for n in range(steps.first[step], steps.first[step + 1]):
            worth -= steps.size[n] * (prices.until[steps.end[n]] - prices.until[steps.begin[n]])
        total += max(0.0, worth)
        share = min(1.0, worth / blur + 0.5)
        if share > 0.0:
            for n in range(steps.first[step], steps.first[step + 1]):
                prices.wanted[steps.begin[n]] += share * steps.size[n]
                prices.wanted[steps.end[n]] -= share * steps.size[n]
    for place in range(1, len(steps.room)):
        prices.wanted[place] += prices.wanted[place - 1]
    return total


def _climb(steps, prices, turns, best, lowest, pool):
    """Take a turn for each (blur, step); `best` are the prices of the lowest limit so far, `lowest`."""
    for turn in range(len(turns)):
        limit = _weigh(steps, prices, turns[turn, 0])
        if limit < lowest[0]:
            lowest[0] = limit
            for place in range(len(best)):
                best[place] = prices.each[place]
        move(steps, prices, turns[turn, 1], pool)


@called
def _fits(steps, step, used):
    """Keep the stays of a step on their places, and return whether they fit; else take them back."""
    for n in range(steps.first[step], steps.first[step + 1]):
        for place in range(steps.begin[n], steps.end[n]):
            used[place] += steps.size[n]
            if used[place] > steps.room[place]:
                _take_back(steps, step, n, place, used)
                return False
    return True


@called
def _take_back(steps, step, last, until, used):
    for n in range(steps.first[step], last + 1):
        for place in range(steps.begin[n], until + 1 if n == last else steps.end[n]):
            used[place] -= steps.size[n]


def _choose(steps, order, used, told):
    """Take steps in this order, each if it fits; count them in `told`."""
    for at in range(len(order)):
        if _fits(steps, order[at], used):
            told[0] += 1


CLIMB, CHOOSE = compiled(_climb), compiled(_choose)


def most_complete(
    demands: Demands, cut: Cut, sizes: Sequence[int], pools: Sequence[int], warm: Sequence[int] = ()
) -> Bracket:
    """Bracket the most complete steps.

    `sizes`: of an expert, by layer, or of every expert x, and `pools`, in one unit; `warm`: experts of the model that
    are cached at the start.
    """
    steps = _steps(demands, cut, of_every(sizes, cut), np.array(pools, np.int64), warm)
    if not len(steps.size):
        return Bracket(len(steps.first) - 1, len(steps.first) - 1)
    prices = _begun(steps)
    best, lowest, pool = prices.each.copy(), np.full(1, np.inf), max(1, int(np.mean(pools)))
    planned, at_once = paces_of(len(steps.size)), max(1, AT_ONCE // len(steps.size))
    for first in range(0, len(planned), at_once):
        check_stop()
        CLIMB(steps, prices, planned[first : first + at_once], best, lowest, pool)
    reached = max(_reached(steps, each) for each in (best, np.ones(len(best))))
    return Bracket(reached, min(_in_integers(steps, best), len(steps.first) - 1))


def _reached(steps: Steps, prices: np.ndarray) -> int:
    """Return the complete steps of the way at these prices."""
    until = np.concatenate([[0.0], np.cumsum(prices)])
    paid = np.concatenate([[0.0], np.cumsum(steps.size * (until[steps.end] - until[steps.begin]))])[steps.first]
    told = np.zeros(1, np.int64)
    CHOOSE(steps, np.argsort(np.diff(paid), kind="stable"), np.zeros(len(steps.room), np.int64), told)
    return int(told[0])


def _steps(demands: Demands, cut: Cut, sizes: np.ndarray, pools: np.ndarray, warm: Sequence[int]) -> Steps:
    """Return the steps that demand something, fit their pool, and have no first use."""
    many = np.diff(demands.offsets)
    step, layers = np.repeat(np.arange(len(many)), many), np.arange(len(many)) % cut.layers
    pool_of = layers if cut.per_layer else np.zeros_like(layers)
    look_up = step if cut.atomic else np.arange(len(step))
    of_look_up = pool_of if cut.atomic else pool_of[step]
    order = np.argsort(of_look_up, kind="stable")  # places of a pool follow each other
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    end, room = place[look_up], pools[of_look_up[order]]
    x, begun = layers[step] * cut.experts + demands.expert, np.cumsum(demands.fresh)[step // cut.layers]
    begin = _last_uses(x, begun, end)
    at_start = (begin == NOWHERE) & np.isin(x, list(warm)) & (begun == begun[:1])
    begin[at_start] = np.searchsorted(of_look_up[order], pool_of[step[at_start]])
    whole = (many > 0) & (step_bytes(demands, cut, sizes) <= pools[pool_of])
    whole[step[begin == NOWHERE]] = False
    kept = whole[step] & (begin < end)
    first = np.concatenate([[0], np.cumsum(np.bincount(step[kept], minlength=len(many))[whole])])
    return Steps(first, begin[kept], end[kept], sizes[x[kept]], room)


def _last_uses(x: np.ndarray, begun: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return the place of the use of the same expert before each, since the start or the last reset, or NOWHERE."""
    order, found = np.lexsort((x, begun)), np.full(len(x), NOWHERE)  # stable: the uses of an expert in their order
    again = (np.diff(x[order]) == 0) & (np.diff(begun[order]) == 0)
    found[order[1:][again]] = place[order[:-1][again]]
    return found


def _begun(steps: Steps) -> Prices:
    """Return the best uniform price: choose the steps with the least size x places that fit in all room."""
    areas = np.concatenate([[0], np.cumsum(steps.size * (steps.end - steps.begin))])[steps.first]
    area = np.sort(np.diff(areas)).astype(np.float64)
    first_out = int(np.searchsorted(np.cumsum(area), steps.room.sum(dtype=np.float64), "right"))
    places = len(steps.room)
    price = 1.0 / max(1.0, area[min(first_out, len(area) - 1)])
    return Prices(np.full(places, price), np.zeros(places + 1), *(np.zeros(places) for _ in range(3)))


def _in_integers(steps: Steps, prices: np.ndarray) -> int:
    """Return the limit at these prices, rounded down: it holds for integer prices just as well."""
    one = 1 << BITS
    whole = np.rint(np.minimum(prices, 1.0) * one).astype(np.int64)
    until = np.concatenate([[0], np.cumsum(whole)])
    paid = np.minimum(until[steps.end] - until[steps.begin], one // steps.size + 1) * steps.size  # beyond, worth is 0
    spent = np.concatenate([[0], np.cumsum(paid)])[steps.first]  # may wrap, as differences do not
    worth = np.maximum(one - np.diff(spent), 0)
    lower = (1 << 20) - 1
    room = sum(map(mul, steps.room.tolist(), whole.tolist()))  # may not fit 64 bits
    return room + (int((worth >> 20).sum()) << 20) + int((worth & lower).sum()) >> BITS
