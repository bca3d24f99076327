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

import numpy as np

from moereplay.simulator.curves.stream import NOWHERE, Cut, Demands, of_every, step_bytes
from moereplay.simulator.curves.unequal import Bracket, Goals, best_prices, in_integers
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called

BITS = 40  #: of a price that is worth a step


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


CHOOSE = compiled(_choose)


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
    best = best_prices(steps, max(1, int(np.mean(pools))))
    reached = max(_reached(steps, each) for each in (best, np.ones(len(best))))
    return Bracket(reached, min(in_integers(steps, best, BITS), len(steps.first) - 1))


def _reached(steps: Goals, prices: np.ndarray) -> int:
    """Return the complete steps of the way at these prices."""
    until = np.concatenate([[0.0], np.cumsum(prices)])
    paid = np.concatenate([[0.0], np.cumsum(steps.size * (until[steps.end] - until[steps.begin]))])[steps.first]
    told = np.zeros(1, np.int64)
    CHOOSE(steps, np.argsort(np.diff(paid), kind="stable"), np.zeros(len(steps.room), np.int64), told)
    return int(told[0])


def _steps(demands: Demands, cut: Cut, sizes: np.ndarray, pools: np.ndarray, warm: Sequence[int]) -> Goals:
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
    return Goals(first, begin[kept], end[kept], sizes[x[kept]], room, single=False)


def _last_uses(x: np.ndarray, begun: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return the place of the use of the same expert before each, since the start or the last reset, or NOWHERE."""
    order, found = np.lexsort((x, begun)), np.full(len(x), NOWHERE)  # stable: the uses of an expert in their order
    again = (np.diff(x[order]) == 0) & (np.diff(begun[order]) == 0)
    found[order[1:][again]] = place[order[:-1][again]]
    return found
