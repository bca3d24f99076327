"""Misses that no admissible routing and no eviction avoid: a lower limit by Lagrangian relaxation.

Two kinds of rules couple the experts: a pool holds no more than its slots after any step, and every token runs enough
of its candidates. Give each a price instead (Held and Karp, 1971): `holding`, in misses, of a slot over the boundary
after a step, and `worth`, of what a token still needs. For any prices that are not negative, the cheapest way of every
expert by itself, plus what the tokens need at its worth, less what the slots hold at their price, is at most the misses
of any admissible way: a broken rule costs, a kept one never more than it brings. An expert by itself has two states,
cached or not, so one walk over its candidates finds its cheapest way. Prices climb by subgradients (Polyak, 1969),
in floats; a limit is then counted in integers, so that it holds however good the prices are.

The relaxed bound's state is all that a pool holds after a step, as in `curves/stream.py`: nothing has to be admitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called
from moereplay.simulator.limits.choices import Choices
from moereplay.simulator.threads import check_stop

NEVER = 1 << 61  #: the cost of what cannot be
MOMENTUM = 0.7
PATIENCE, SHRINK = 10, 0.8  #: consecutive prices without gain, before a climb restarts with smaller moves
SHOWN_EVERY = 50  #: prices, of which ways are made
LEAST_TURNS, MOST_TURNS, COUNTED = 100, 400, 500_000_000
#: Where a search begins; holding is for as long as a pass takes.
STARTS_WORTH, STARTS_HOLDING = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9), (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)
MOST_HOLDING, MOST_WORTH = 1.0, 2.0  #: prices beyond which nothing more is gained, or sums could overflow


class Pools(NamedTuple):
    """Pools in which experts are cached."""

    slots: np.ndarray  #: (pools,) int64
    starts: np.ndarray  #: (S,) int64: how many resets came before each step
    layers: int
    stride: int  #: steps from one boundary of a pool to the next: 1, or the layers where each has a pool
    unit: int  #: of costs: how many make a miss


class Prices(NamedTuple):
    """Prices in misses, as floats, and the last direction of the climb."""

    holding: np.ndarray  #: (S,)
    worth: np.ndarray  #: (C,), per expert that a rule needs
    holding_way: np.ndarray
    worth_way: np.ndarray


class Solved(NamedTuple):
    """The cheapest ways of all experts at given prices; costs in `Pools.unit` of a miss."""

    before: np.ndarray  #: (S,) int64: holding prices of the boundaries of a step's pool before it, summed
    reward: np.ndarray  #: (n,) int64
    absent: np.ndarray  #: (experts,) int64: the least cost so far, and for the rest if the expert is not cached
    cached: np.ndarray  #: (experts,) int64: the same if it is, holding from `last` on not counted
    last: np.ndarray  #: (experts,) int64: the step of its last candidate
    until: np.ndarray  #: (experts,) int64: the step until which it is held, or -1
    found: np.ndarray  #: (n,) int8: 1 if the candidate is used from the cache
    passed: np.ndarray  #: (n,) int8: 1 if it is not used unless it is to be cached
    used: np.ndarray  #: (n,) int8
    holds: np.ndarray  #: (S,) int64: experts held over the boundary after each step
    lacks: np.ndarray  #: (C,) int64: the unmet need of each rule
    charged: np.ndarray  #: (S,) int64: the price of a slot over the boundary after each step
    brought: np.ndarray  #: (C,) int64: the worth of a share of each rule


@called
def _charge(rules, pools, prices, out):
    """Return prices as integers: of holding, summed along each pool, and of use, per candidate."""
    out.reward[:] = 0
    for s in range(len(prices.holding)):
        earlier = s - pools.stride
        out.charged[s] = np.int64(prices.holding[s] * pools.unit)
        out.before[s] = out.before[earlier] + out.charged[earlier] if earlier >= 0 else 0
    for c in range(len(prices.worth)):
        out.brought[c] = np.int64(prices.worth[c] * pools.unit * rules.most[c] / max(1, rules.need[c]))
        for at in range(rules.offsets[c], rules.offsets[c + 1]):
            out.reward[rules.candidate[at]] += out.brought[c] * rules.share[at]


@called
def _walk(rules, pools, out):
    """Compute the least costs of each expert, candidate by candidate."""
    for n in range(len(rules.step)):
        x, s = rules.unit[n], rules.step[n]
        found = out.cached[x] < NEVER and pools.starts[out.last[x]] == pools.starts[s]
        held = out.cached[x] + out.before[s] - out.before[out.last[x]] if found else np.int64(NEVER)
        fetched = out.absent[x] + pools.unit
        out.found[n] = held <= fetched
        after = min(held, fetched) - out.reward[n]
        out.passed[n] = rules.forced[n] == 0 and out.absent[x] < after
        out.absent[x] = out.absent[x] if out.passed[n] else after
        out.cached[x], out.last[x] = after, s


@called
def _trace_back(rules, pools, out):
    """Mark what the cheapest solutions use and hold."""
    out.holds[:] = 0
    out.until[:] = -1
    for n in range(len(rules.step) - 1, -1, -1):
        x, s = rules.unit[n], rules.step[n]
        if out.until[x] >= 0:
            out.holds[s] += 1
            out.holds[out.until[x]] -= 1
        out.used[n] = out.until[x] >= 0 or out.passed[n] == 0
        if out.used[n] == 1:
            out.until[x] = s if out.found[n] == 1 else -1
    for x in range(len(out.until)):
        if out.until[x] >= 0:  # held since the start
            out.holds[x // (len(out.until) // pools.layers) if pools.stride > 1 else 0] += 1
            out.holds[out.until[x]] -= 1
    for s in range(pools.stride, len(out.holds)):
        out.holds[s] += out.holds[s - pools.stride]


@called
def _count_lacks(rules, out):
    for c in range(len(rules.need)):
        out.lacks[c] = rules.need[c]
        for at in range(rules.offsets[c], rules.offsets[c + 1]):
            out.lacks[c] -= rules.share[at] * out.used[rules.candidate[at]]


def _solve(rules, pools, prices, out):
    """Find the cheapest ways at these prices; `absent`, `cached` and `last` must be as at the start."""
    _charge(rules, pools, prices, out)
    _walk(rules, pools, out)
    _trace_back(rules, pools, out)
    _count_lacks(rules, out)


@called
def _direction(way, lacking, price):
    """Return the direction of a price: up if a rule is violated, else down, with momentum."""
    own = 0.0 if price <= 0.0 and lacking < 0.0 else lacking
    return own + MOMENTUM * way


def _climb(rules, pools, prices, out, far):
    """Move all prices: `far[0]` is the intended gain, `far[1]` the scale of holding prices."""
    norm = 0.0
    for s in range(len(out.holds)):
        over = out.holds[s] - pools.slots[s % pools.layers if pools.stride > 1 else 0]
        prices.holding_way[s] = _direction(prices.holding_way[s], float(over), prices.holding[s])
        norm += far[1] * prices.holding_way[s] ** 2
    for c in range(len(out.lacks)):
        lacking = out.lacks[c] * rules.most[c] / max(1, rules.need[c])
        prices.worth_way[c] = _direction(prices.worth_way[c], lacking, prices.worth[c])
        norm += prices.worth_way[c] ** 2
    size = far[0] / norm if norm > 0.0 else 0.0
    for s in range(len(out.holds)):
        moved = prices.holding[s] + size * far[1] * prices.holding_way[s]
        prices.holding[s] = min(MOST_HOLDING, max(0.0, moved))
    for c in range(len(out.lacks)):
        prices.worth[c] = min(MOST_WORTH, max(0.0, prices.worth[c] + size * prices.worth_way[c]))


SOLVE, CLIMB = compiled(_solve), compiled(_climb)


class Relaxation:
    """The search for good prices. `limit`, in misses, holds at any time."""

    def __init__(self, rules: Choices, pools: Pools, experts: int, warm: Sequence[int]) -> None:
        """`experts` of the model, `warm` of which are cached at the start."""
        steps, many = len(rules.begins) - 1, len(rules.need)
        self._rules, self._pools, self._warm = rules, pools, np.array(warm, np.int64)
        self._prices, self._best = _prices(steps, many), _prices(steps, many)
        self._out = _solved(len(rules.step), steps, many, experts)
        self._scale = 1.0 if pools.stride > 1 else pools.layers**-2.0  # a global pool has as many more boundaries
        self._size, self._behind, self._most = 1.0, 0, -np.inf
        self.limit = 0

    def search(self, reached: list[int]) -> Iterator[tuple[Prices, Solved]]:
        """Try prices; yield some on the way, and the best at last. `reached[0]`: misses of the best known way."""
        self._begin()
        for turn in range(turns(self._rules)):
            check_stop()
            gained = self._evaluate()
            if turn % SHOWN_EVERY == 0:
                yield self._prices, self._out
            if self.limit >= reached[0]:
                return
            if self._behind >= PATIENCE:
                self._go_back()
                continue
            far = np.array([self._size * max(0.0, reached[0] - gained), self._scale])
            CLIMB(self._rules, self._pools, self._prices, self._out, far)
        _copy(self._best, self._prices)
        self._evaluate()
        yield self._prices, self._out

    def _begin(self) -> None:
        """Start with the best of uniform prices."""
        each = 1 if self._pools.stride > 1 else self._pools.layers
        for worth, holding in product(STARTS_WORTH, STARTS_HOLDING):
            self._prices.worth[:], self._prices.holding[:] = worth, holding / each
            self._evaluate()
        self._go_back()
        self._size = 1.0

    def _go_back(self) -> None:
        """Return to the best prices, for smaller moves."""
        self._behind, self._size = 0, self._size * SHRINK
        _copy(self._best, self._prices)
        self._prices.holding_way[:], self._prices.worth_way[:] = 0, 0

    def _evaluate(self) -> float:
        """Compute the limit at the present prices, in misses; keep them if it is the highest so far."""
        out, pools = self._out, self._pools
        out.absent[:], out.cached[:], out.last[:] = 0, NEVER, 0
        out.cached[self._warm] = 0
        if pools.stride > 1:  # an expert is held from the first step of its pool on
            out.last[:] = np.arange(len(out.last)) // (len(out.last) // pools.layers)
        SOLVE(self._rules, pools, self._prices, out)
        held = out.charged.reshape(-1, len(pools.slots)).sum(0).tolist()
        paid = sum(each * slots for each, slots in zip(held, pools.slots.tolist(), strict=True))
        whole = int(out.absent.sum()) + int((out.brought * self._rules.need).sum()) - paid
        self.limit = max(self.limit, -(-whole // pools.unit))
        self._behind += 1
        if whole > self._most:
            self._most, self._behind = whole, 0
            _copy(self._prices, self._best)
        return whole / pools.unit


def turns(rules: Choices) -> int:
    """Return how many prices to try: fewer for larger problems, to bound the time."""
    return min(MOST_TURNS, max(LEAST_TURNS, COUNTED // (len(rules.step) + len(rules.candidate) + 1)))


def unit_of(rules: Choices) -> int:
    """Return the cost unit of a miss, as fine as sums in int64 permit."""
    return 1 << min(36, 57 - (len(rules.step) + len(rules.candidate) + len(rules.begins)).bit_length())


def _prices(steps: int, rules: int) -> Prices:
    return Prices(np.zeros(steps), np.zeros(rules), np.zeros(steps), np.zeros(rules))


def _copy(source: Prices, target: Prices) -> None:
    target.holding[:], target.worth[:] = source.holding, source.worth


def _solved(candidates: int, steps: int, rules: int, experts: int) -> Solved:
    def zeros(many: int) -> np.ndarray:
        return np.zeros(many, np.int64)

    def flags() -> np.ndarray:
        return np.zeros(candidates, np.int8)

    return Solved(
        before=zeros(steps),
        reward=zeros(candidates),
        absent=zeros(experts),
        cached=zeros(experts),
        last=zeros(experts),
        until=zeros(experts),
        found=flags(),
        passed=flags(),
        used=flags(),
        holds=zeros(steps),
        lacks=zeros(rules),
        charged=zeros(steps),
        brought=zeros(rules),
    )
