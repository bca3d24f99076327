"""Evictions that order residents by a number: each definition in a few lines, over everything that ever happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tests.kit.policy_models import DemandStep
from tests.kit.policy_models_eviction import Pool

NEVER = -math.inf
MILLIONTH = Fraction(1, 10**6)


class Use(NamedTuple):
    """One use of an expert."""

    step_pass: int
    step: int
    number: int  #: timestamps given before it
    high: bool  #: at the highest precision


class Ranked(Pool):
    """The resident of smallest `rank` is evicted; ties by least recent timestamp, then lowest id."""

    def __init__(self, *setting: Any, rank: Rank, lets_in: LetsIn | None = None) -> None:
        super().__init__(*setting)
        self.rank, self._lets_in, self.may_decline = rank, lets_in, lets_in is not None
        self.uses = dict[int, list[Use]]()
        self.high = True  # whether the use to come is of the most precise copy
        self.seen, self.hinted, self.evicted = dict[int, int](), dict[int, int](), dict[int, int]()  # in which pass
        self.touched = list[int]()  # as timestamps, but a prediction counts too
        by_count = sorted(self.facts.counts, key=lambda y: (-self.facts.counts[y], y))
        self.places = {x: place for place, x in enumerate(by_count)}

    def victim(self, candidates: list[int], x: int) -> int:
        return min(candidates, key=lambda y: (self.rank(self, y), self.by_timestamp.index(y), y))

    def lets_in(self, x: int, leaving: int) -> bool:
        return self._lets_in is None or self._lets_in(self, x, leaving)

    def declined(self, x: int) -> None:
        """Forget a bypassed expert as if it had been evicted."""
        self.evicted[x] = self.time

    def used(self, x: int, hit: bool) -> None:
        step = self.now.step_pass * self.facts.layers + self.now.layer
        self.uses.setdefault(x, []).append(Use(self.now.step_pass, step, self.time, self.high))
        self._see(x)

    def arrived(self, x: int, prefetched: bool) -> None:
        self.seen[x] = self.now.step_pass
        if prefetched:
            self._see(x)

    def named(self, x: int) -> None:
        self.hinted[x] = self.now.step_pass
        self.touched = [*(y for y in self.touched if y != x), x]

    def left(self, x: int) -> None:
        self.evicted[x] = self.time

    def _see(self, x: int) -> None:
        self.seen[x] = self.now.step_pass
        self.touched = [*(y for y in self.touched if y != x), x]

    # words that the definitions use

    def uses_of(self, x: int) -> list[Use]:
        return self.uses.get(x, [])

    def uses_here(self, x: int) -> list[Use]:
        """Since it last left."""
        return [use for use in self.uses_of(x) if use.number > self.evicted.get(x, -1)]

    def in_request(self, x: int) -> list[Use]:
        """In the request in progress."""
        return [use for use in self.uses_of(x) if self.request_of(use.step_pass) == self.request_of(self.now.step_pass)]

    def request_of(self, step_pass: int) -> int:
        return self.facts.request[step_pass]

    def layer(self, x: int) -> int:
        return x // self.facts.experts

    def ahead(self, x: int) -> int:
        return (self.layer(x) - self.now.layer) % self.facts.layers

    def predicted(self, x: int) -> bool:
        """Named or brought by a prefetch of this pass for a layer that is still to come."""
        brought = self.unused_prefetch.get(x) and self.seen[x] == self.now.step_pass
        named = self.hinted.get(x) == self.now.step_pass
        return self.layer(x) > self.now.layer and (named or bool(brought))

    def gates_of(self, x: int) -> list[DemandStep]:
        """Of its layer, so far."""
        return [gate for gate in self.gates if gate.layer == self.layer(x)]

    def scores(self, x: int) -> list[int]:
        """Return the scores that those gates gave it."""
        layer, e = divmod(x, self.facts.experts)
        return [self.facts.scores[gate.step_pass][layer][e] for gate in self.gates_of(x)]

    def place(self, x: int) -> float:
        """In the order of how often the trace chose it, ties by id; never: nowhere."""
        return self.places.get(x, math.inf)

    def is_pinned(self, x: int, share: float) -> bool:
        """Return True if x is among the best that fill a share of this pool."""
        better = [y for y in self.size if self.place(y) < self.place(x)]
        fits = sum(self.size[y] for y in better) + self.size[x] <= self.capacity * share
        return fits and self.place(x) < math.inf


Rank = Callable[[Ranked, int], Any]
LetsIn = Callable[[Ranked, int, int], bool]


def staleness(m: Ranked, x: int, order: str, fifo: bool = False) -> tuple[bool, int]:
    """Least-Stale: what this pass touched is evicted last; inside, the reading of "FIFO by layer position"."""
    current = is_current(m, x)
    if order == "a":
        return current, x
    if order == "b" or (current and fifo):
        return current, m.by_timestamp.index(x)
    ahead = turns_ahead(m, x)
    if order == "d" and (m.layer(x) < m.now.layer or ahead == m.facts.layers):
        return current, m.layer(x) - 2 * m.facts.layers  # before all that are ahead
    return current, -ahead


def is_current(m: Ranked, x: int) -> bool:
    """Used, fetched or suggested in this pass."""
    return m.now.step_pass in (m.seen[x], m.hinted.get(x, -1))


def turns_ahead(m: Ranked, x: int) -> int:
    """Layers until its next turn; a whole round once its layer has used it or does not want it."""
    uses = m.uses_of(x)
    used_here = bool(uses) and uses[-1].step == m.now.step_pass * m.facts.layers + m.now.layer
    done = m.layer(x) == m.now.layer and (used_here or x not in m.now.demand)
    return m.facts.layers if done else m.ahead(x)


def kth_use(m: Ranked, x: int, k: int, history: str = "kept", among: str = "lru") -> tuple[float, int]:
    """The time of the K-th most recent use, or the order among those without."""
    uses = m.uses_of(x) if history == "kept" else m.uses_here(x)
    if len(uses) >= k:
        return uses[-k].number, 0
    return NEVER, list(m.residents).index(x) if among == "fifo" else 0


def decayed(m: Ranked, x: int, half_life: int) -> float:
    """Each use worth half after each half-life."""
    return sum(0.5 ** ((m.now.step_pass - use.step_pass) / half_life) for use in m.uses_of(x))


def frequency_per_age(m: Ranked, x: int) -> Fraction:
    """Uses per step since the last one."""
    now = m.now.step_pass * m.facts.layers + m.now.layer
    return Fraction(len(m.uses_of(x)), now - m.uses_of(x)[-1].step + 1) if m.uses_of(x) else Fraction(0)


def aged(m: Ranked, x: int, half_life: int, touch: bool = False) -> Fraction:
    """Minus age / 2**class."""
    count = decayed(m, x, half_life)
    level = min(7, max(0, math.floor(math.log2(count)))) if count > 0 else 0
    seen = max(m.seen[x], m.hinted.get(x, -1)) if touch else m.seen[x]
    return -Fraction(m.now.step_pass - seen, 2**level)


def multidimensional(m: Ranked, x: int, weights: Sequence[float], mask: bool = True) -> tuple[bool, Fraction]:
    """HOBBIT's sum, as printed."""
    lru, lfu, lhu, fld = map(Fraction, weights)
    uses, tokens = m.in_request(x), m.facts.position[m.now.step_pass] + 1
    last = m.facts.position[uses[-1].step_pass] + 1 if uses else 0
    nearness = 1 - Fraction(m.ahead(x), m.facts.layers)
    high = sum(use.high for use in uses)
    total = (lru * last + lfu * len(uses) + lhu * high) / tokens + fld * nearness
    return mask and m.predicted(x), total


def windowed_mass(m: Ranked, x: int, window: int) -> int:
    """Gate weights of the last passes."""
    return sum(gate.mass.get(x, 0) for gate in m.gates_of(x) if gate.step_pass > m.now.step_pass - window)


def recent_score(m: Ranked, x: int, a: str, p: int) -> Fraction:
    """S <- a TopP(s) + (1 - a) S over all gates of its layer."""
    first = m.layer(x) * m.facts.experts
    everyone = [m.scores(first + e) for e in range(m.facts.experts)]
    average = Fraction(0)
    for scores in zip(*everyone, strict=True):
        top = sorted(range(len(scores)), key=lambda e, scores=scores: (-scores[e], e))[: p * m.facts.k]
        average = Fraction(a) * (scores[x - first] if x - first in top else 0) + (1 - Fraction(a)) * average
    return average


def activation(m: Ranked, x: int, frequency: bool = True, mask: bool = True) -> tuple[bool, Fraction]:
    """MoE-Infinity's product; with one token per pass every gate makes k assignments."""
    request = m.request_of(m.now.step_pass)
    gates = [gate for gate in m.gates_of(x) if m.request_of(gate.step_pass) == request]
    mine = sum(x in gate.demand for gate in gates)
    share = Fraction(mine, len(gates) * m.facts.k) if gates else Fraction(1, m.facts.experts)
    product = (share + MILLIONTH) * (1 - Fraction(m.layer(x), m.facts.layers))
    if frequency:
        product *= Fraction(sum(x in gate.demand for gate in m.gates), len(m.gates) * m.facts.k) + MILLIONTH
    return mask and m.predicted(x), product


class Shielded(Ranked):
    """SMoE: a FIFO of predictions that may hold half of the bytes, and the mean score of the last n + 1 iterations."""

    def __init__(self, *setting: Any, n: int) -> None:
        super().__init__(*setting, rank=lambda m, x: (x in self.shield, self.mean(x)))
        self.n, self.shield = n, list[int]()

    def mean(self, x: int) -> Fraction:
        recent = self.scores(x)[-self.n - 1 :]
        return Fraction(sum(recent), len(recent)) if recent else Fraction(0)

    def _protect(self, x: int) -> None:
        if x not in self.shield:
            self.shield.append(x)
        while 2 * sum(self.size[y] for y in self.shield) > self.capacity:
            self.shield.pop(0)

    def _expose(self, x: int) -> None:
        self.shield = [y for y in self.shield if y != x]

    def named(self, x: int) -> None:
        super().named(x)
        self._protect(x)

    def arrived(self, x: int, prefetched: bool) -> None:
        super().arrived(x, prefetched)
        if prefetched:
            self._protect(x)

    def used(self, x: int, hit: bool) -> None:
        super().used(x, hit)
        self._expose(x)

    def left(self, x: int) -> None:
        super().left(x)
        self._expose(x)


class Foresight(Pool):
    """Belady: the farthest next use is evicted; of those beyond a window the least recent, of those never used again,
    where there is no window, the last."""

    decides_once = True

    def __init__(self, *setting: Any, stream: Sequence[tuple[int, int]], window: int, bypass: bool) -> None:
        super().__init__(*setting)
        self.future, self.window, self.may_decline = list(stream), window, bypass

    def used(self, x: int, hit: bool) -> None:
        assert self.future.pop(0)[1] == x

    def next_use(self, x: int) -> float:
        for at, (step_pass, y) in enumerate(self.future):
            if y == x and (not self.window or step_pass <= self.now.step_pass + self.window):
                return at
        return math.inf

    def victim(self, candidates: list[int], x: int) -> int:
        return min(candidates, key=lambda y: (-self.next_use(y), self.by_timestamp.index(y) if self.window else -y))

    def lets_in(self, x: int, leaving: int) -> bool:
        return self.next_use(x) <= self.next_use(leaving)
