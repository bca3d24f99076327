"""Slow, obvious models of the policies, written from their definitions and not from the code under test.

An eviction model holds expert ids x = layer * E + e and is called in the order of the demand stream: a step begins, an
expert is looked up (`has`), used, and admitted if it was missing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from moereplay.traces.schema import Trace

UNIT = 2**24


class DemandStep(NamedTuple):
    """One step of one-token passes: experts in demand order, and their gate weights."""

    step_pass: int
    layer: int
    layers: int
    experts: int  #: per layer
    demand: list[int]
    mass: dict[int, int]


def one_token_steps(trace: Trace) -> list[DemandStep]:
    """Demand order is by descending weight, ties by lowest id."""
    chosen, weights, sizes = trace.read("chosen"), trace.read("weights"), trace.geometry
    steps = []
    for t in range(trace.tokens):
        for layer in range(sizes.layers):
            units = [round(float(weight) * UNIT) for weight in weights[t, layer]]
            mass = {layer * sizes.experts + int(e): unit for e, unit in zip(chosen[t, layer], units, strict=True)}
            demand = sorted(mass, key=lambda x, mass=mass: (-mass[x], x))
            steps.append(DemandStep(t, layer, sizes.layers, sizes.experts, demand, mass))
    return steps


# -- eviction -----------------------------------------------------------------------------------------------------


class Model:
    """The interface of every eviction model."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def begin(self, step: DemandStep) -> None:
        """A step's gate opens."""

    def has(self, x: int) -> bool:
        raise NotImplementedError

    def use(self, x: int) -> None:
        """x was looked up, and is resident or will be."""

    def admit(self, x: int, kept: Collection[int]) -> None:
        """x comes in; nothing of `kept` may be evicted for it."""


def play(steps: Sequence[DemandStep], pools: Sequence[Model], contract: str) -> list[bool]:
    """Hit or miss of every access, with one model for all layers or one per layer."""
    hits = []
    for step in steps:
        for pool in pools:
            pool.begin(step)
        model = pools[step.layer % len(pools)]
        hits += _together(model, step.demand) if contract == "atomic" else _one_by_one(model, step.demand)
    return hits


def _together(model: Model, demand: list[int]) -> list[bool]:
    hits = [model.has(x) for x in demand]
    for x in demand:
        model.use(x)
    for x, hit in zip(demand, hits, strict=True):
        if not hit:
            model.admit(x, kept=demand)
    return hits


def _one_by_one(model: Model, demand: list[int]) -> list[bool]:
    hits = []
    for x in demand:
        hits.append(model.has(x))
        model.use(x)
        if not hits[-1]:
            model.admit(x, kept=[x])
    return hits


class Lru(Model):
    """A list of everything ever used, oldest use first, and the set of what is resident."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.residents, self.by_use = set[int](), list[int]()

    def has(self, x: int) -> bool:
        return x in self.residents

    def use(self, x: int) -> None:
        self.by_use = [*(y for y in self.by_use if y != x), x]

    def admit(self, x: int, kept: Collection[int]) -> None:
        if len(self.residents) == self.slots:
            self.residents.remove(next(y for y in self.by_use if y in self.residents and y not in kept))
        self.residents.add(x)


class Arc(Model):
    """The pseudo code of Megiddo and Modha, FAST 2003, figure 4; lists run from LRU to MRU. Sequential only."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = list[int](), list[int](), list[int](), list[int]()

    def has(self, x: int) -> bool:
        return x in self.t1 or x in self.t2

    def use(self, x: int) -> None:
        """Case I."""
        for top in (self.t1, self.t2):
            if x in top:
                top.remove(x)
                self.t2.append(x)
                return

    def admit(self, x: int, kept: Collection[int]) -> None:
        """Cases II to IV."""
        if x in self.b1:
            self.p = min(float(self.slots), self.p + max(1.0, len(self.b2) / len(self.b1)))
            self._ghost_returns(self.b1, x)
        elif x in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self._ghost_returns(self.b2, x)
        else:
            self._make_room(x)
            self.t1.append(x)

    def _ghost_returns(self, ghosts: list[int], x: int) -> None:
        self._replace(x)
        ghosts.remove(x)
        self.t2.append(x)

    def _make_room(self, x: int) -> None:
        everything = sum(map(len, (self.t1, self.t2, self.b1, self.b2)))
        if len(self.t1) == self.slots:
            self.t1.pop(0)
        elif len(self.t1) + len(self.b1) == self.slots:
            self.b1.pop(0)
            self._replace(x)
        elif everything >= self.slots:
            if everything == 2 * self.slots:
                self.b2.pop(0)
            self._replace(x)

    def _replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


# -- prefetch -----------------------------------------------------------------------------------------------------


def best(scores: Sequence[int], count: int) -> list[int]:
    """The `count` experts of highest score, ties to the lowest id."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:count]


def named(scores: Sequence[Sequence[int]], picks: Sequence[Collection[int]]) -> list[int]:
    """The union of each token's picks by descending largest score over all tokens (T, E), ties by lowest id."""
    union = set[int]().union(*picks)
    return sorted(union, key=lambda e: (-max(row[e] for row in scores), e))


def above_percentile(scores: Sequence[int], percentile: int) -> list[int]:
    """Experts that score more than the linearly interpolated percentile of these scores."""
    ranked, at = sorted(scores), Fraction(percentile * (len(scores) - 1), 100)
    low, high = ranked[math.floor(at)], ranked[math.ceil(at)]
    threshold = low + (at - math.floor(at)) * (high - low)
    return [e for e, score in enumerate(scores) if score > threshold]


def five_bits(score: int) -> int:
    """The score with all but its five leading bits cleared: what a running percentile can tell apart."""
    dropped = max(0, score.bit_length() - 5)
    return score >> dropped << dropped


def above_running(history: list[int], scores: Sequence[int], percentile: int) -> list[int]:
    """Experts above the percentile of everything seen, to five bits; adds these scores to the history first."""
    history += map(five_bits, scores)
    ranked = sorted(history)
    threshold = ranked[math.ceil(Fraction(percentile * len(ranked), 100)) - 1]
    return [e for e, score in enumerate(scores) if five_bits(score) > threshold]


# -- misses -------------------------------------------------------------------------------------------------------


def cascade_tier(n: int, demanded: int, below: Sequence[str]) -> int:
    """0 for the most important; tier i + 1 for the bottom below[i] of the demand."""
    from_the_bottom = demanded - n
    return max([i + 1 for i, share in enumerate(below) if from_the_bottom <= Fraction(share) * demanded], default=0)
