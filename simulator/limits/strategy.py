"""Misses of one admissible routing and eviction, which shows how close the lower limit is to a feasible result.

Every token, in the order of its pass, takes cached experts, or ones already used in this step, as far as its rule
permits, and misses as few others as it can; of missing experts of equal share it takes those of most worth. After each
step a pool keeps those of most worth. Worth is a key: how soon the expert is a candidate again (`soonest`), or its
price in a relaxation if it is not kept (`priced`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.jit.marks import called
from moereplay.simulator.limits.choices import Choices
from moereplay.simulator.limits.relaxation import NEVER, Pools, Prices, Solved

FREE, PICKED = 1, 2


class Cache(NamedTuple):
    """Cached experts, and those that a step has chosen."""

    key: np.ndarray  #: (experts,) int64: the larger, the longer it is kept
    resident: np.ndarray  #: (experts,) int8
    held: np.ndarray  #: (pools, experts of a pool + 1) int64
    many: np.ndarray  #: (pools,) int64: how many of them
    chosen: np.ndarray  #: (n,) int8: candidates
    state: np.ndarray  #: (p,) int8: of each pair, FREE or PICKED
    misses: np.ndarray  #: (1,) int64


@called
def _best(rules, keys, first, last, state, wanted):
    """Return the pair in a state with the largest share, then the largest key; -1 if there is none."""
    best = -1
    for at in range(first, last):
        if state[at] == wanted:
            share, key = rules.share[at], keys[rules.candidate[at]]
            if (
                best < 0
                or share > rules.share[best]
                or (share == rules.share[best] and key > keys[rules.candidate[best]])
            ):
                best = at
    return best


@called
def _least(rules, first, last, state):
    """Return the pair with the smallest share among picked ones that cost nothing; -1 if there is none."""
    least = -1
    for at in range(first, last):
        if state[at] == FREE | PICKED and (least < 0 or rules.share[at] < rules.share[least]):
            least = at
    return least


@called
def _choose(rules, keys, c, cache):
    """Pick for one rule: first free experts, then as few others as suffice, each for the least of the first."""
    first, last, state = rules.offsets[c], rules.offsets[c + 1], cache.state
    for at in range(first, last):
        n = rules.candidate[at]
        state[at] = FREE if cache.chosen[n] == 1 or cache.resident[rules.unit[n]] == 1 else 0
    lacking, left = rules.need[c], rules.most[c]
    for _ in range(left):
        best = _best(rules, keys, first, last, state, FREE)
        if best >= 0:
            state[best] |= PICKED
            lacking, left = lacking - rules.share[best], left - 1
    while lacking > 0:
        if left == 0:
            least = _least(rules, first, last, state)
            state[least] = FREE | 4
            lacking, left = lacking + rules.share[least], left + 1
        best = _best(rules, keys, first, last, state, 0)
        state[best] |= PICKED
        lacking, left = lacking - rules.share[best], left - 1
    for at in range(first, last):
        if state[at] & PICKED:
            cache.chosen[rules.candidate[at]] = 1


@called
def _insert(rules, s, pool, cache):
    """Count the chosen experts that are not cached, and cache them."""
    for n in range(rules.begins[s], rules.begins[s + 1]):
        x = rules.unit[n]
        if cache.chosen[n] == 1 and cache.resident[x] == 0:
            cache.misses[0] += 1
            cache.resident[x] = 1
            cache.held[pool, cache.many[pool]] = x
            cache.many[pool] += 1


@called
def _evict(slots, pool, cache):
    """Evict the smallest keys until the pool holds no more than its slots."""
    while cache.many[pool] > slots:
        held, least = cache.held[pool], 0
        for at in range(1, cache.many[pool]):
            least = at if cache.key[held[at]] < cache.key[held[least]] else least
        cache.resident[held[least]] = 0
        cache.many[pool] -= 1
        held[least] = held[cache.many[pool]]


def _follow(rules, pools, keys, rows, cache):
    """Step by step. `rows`: the first row of every pass, and how many there are."""
    for s in range(len(rules.begins) - 1):
        pool, layer = s % pools.layers if pools.stride > 1 else 0, s % pools.layers
        if s > 0 and pools.starts[s] != pools.starts[s - 1]:
            cache.resident[:] = 0
            cache.many[:] = 0
        for n in range(rules.begins[s], rules.begins[s + 1]):
            cache.key[rules.unit[n]], cache.chosen[n] = keys[n], rules.forced[n]
        for row in range(rows[s // pools.layers], rows[s // pools.layers + 1]):
            _choose(rules, keys, row * pools.layers + layer, cache)
        _insert(rules, s, pool, cache)
        _evict(pools.slots[pool], pool, cache)


def _soonest(rules, pools, keys, coming):
    """Return the key of every candidate: how soon its expert is one again; `coming` has NEVER for every expert."""
    for n in range(len(rules.step) - 1, -1, -1):
        keys[n] = -coming[rules.unit[n]]
        coming[rules.unit[n]] = rules.step[n]


def _priced(rules, pools, solved, keys, absent, cached, coming):
    """The key of every candidate: what its expert will cost more if it is not kept, and the slot's price until now.

    The price of the slot since the start is left in all keys of a pool alike. `absent`, `cached`: costs from the next
    candidate on, by expert; `coming` is its step, and has NEVER for every expert.
    """
    for n in range(len(rules.step) - 1, -1, -1):
        x, s = rules.unit[n], rules.step[n]
        without, held = absent[x], absent[x]
        keys[n] = -NEVER
        if coming[x] < NEVER and pools.starts[coming[x]] == pools.starts[s]:
            keys[n] = absent[x] - cached[x] - solved.before[coming[x]]
            held = min(without, cached[x] + solved.before[coming[x]] - solved.before[s])
        cached[x] = held - solved.reward[n]
        absent[x] = cached[x] + pools.unit
        if rules.forced[n] == 0:
            absent[x] = min(absent[x], without)
        coming[x] = s


FOLLOW, SOONEST, PRICED = compiled(_follow), compiled(_soonest), compiled(_priced)


class Strategy:
    """Admissible ways for one set of rules, in the same pools from the same start."""

    def __init__(self, rules: Choices, pools: Pools, rows: np.ndarray, experts: int, warm: Sequence[int]) -> None:
        """`rows` (P + 1,): the first row of each pass, and how many there are."""
        self._rules, self._pools, self._rows = rules, pools, np.ascontiguousarray(rows, np.int64)
        self._experts, self._warm = experts, warm

    def soonest(self) -> int:
        """Return the misses by when experts are candidates again."""
        keys, coming = np.zeros(len(self._rules.step), np.int64), np.full(self._experts, NEVER, np.int64)
        SOONEST(self._rules, self._pools, keys, coming)
        return self._misses(keys, -coming)

    def priced(self, prices: Prices, solved: Solved) -> int:
        """Return the misses by prices and their solution."""
        keys, coming = np.zeros(len(self._rules.step), np.int64), np.full(self._experts, NEVER, np.int64)
        absent, cached = np.zeros(self._experts, np.int64), np.zeros(self._experts, np.int64)
        PRICED(self._rules, self._pools, solved, keys, absent, cached, coming)
        there = coming < NEVER
        first = np.full(self._experts, -NEVER, np.int64)
        first[there] = (absent - cached)[there] - solved.before[coming[there]]
        return self._misses(keys, first)

    def _misses(self, keys: np.ndarray, first: np.ndarray) -> int:
        """`first` (experts,): keys before the first step."""
        pools = len(self._pools.slots)
        resident, held = np.zeros(self._experts, np.int8), np.zeros((pools, self._experts // pools + 1), np.int64)
        many = np.zeros(pools, np.int64)
        for x in self._warm:
            pool = x * pools // self._experts
            resident[x], held[pool, many[pool]] = 1, x
            many[pool] += 1
        flags = np.zeros(len(self._rules.step), np.int8), np.zeros(len(self._rules.candidate), np.int8)
        cache = Cache(first.copy(), resident, held, many, *flags, np.zeros(1, np.int64))
        FOLLOW(self._rules, self._pools, keys, self._rows, cache)
        return int(cache.misses[0])
