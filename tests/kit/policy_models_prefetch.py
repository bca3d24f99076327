"""Slow, obvious models of the prefetch policies, written from their definitions and not from the code under test.

A model is called at every gate in run order and returns what it would prefetch: (layer, expert, precision) in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from tests.kit.policy_models import best, named

Name = tuple[int, int, int]  #: layer, expert, precision


class Gate(NamedTuple):
    """Information available at a gate."""

    step_pass: int
    request: int
    layer: int
    layers: int
    ids: Sequence[Sequence[int]]  #: token -> experts in rank order
    look: Sequence[Sequence[Sequence[int]]]  #: distance - 1 -> token -> score by expert
    coming: Mapping[tuple[int, int], int]  #: (layer, expert) -> best precision resident, queued or in flight
    here: Mapping[tuple[int, int], int]  #: the same without what is queued, before anything was looked up
    later: Mapping[int, Sequence[int]]  #: later layer -> what this pass will demand of it, in demand order
    k: int
    precisions: int
    unfetched: Mapping[int, str] = MappingProxyType({})  #: missed experts of the layer: cpu, dropped or substituted
    arrived: Sequence[tuple[int, int]] = ()  #: (layer, expert) that became resident since the policy was last called

    @property
    def demand(self) -> Counter[int]:
        """Tokens by expert."""
        return Counter(e for row in self.ids for e in row)


class PrefetchModel:
    """The interface of every prefetch model."""

    def names(self, gate: Gate) -> list[Name]:
        """In queue order."""
        raise NotImplementedError


class PreviousToken(PrefetchModel):
    """The last token of the pass before, if it was of this request."""

    def __init__(self, depth: int) -> None:
        self.depth, self.last = depth, dict[tuple[int, int], Sequence[int]]()

    def names(self, gate: Gate) -> list[Name]:
        ahead = range(gate.layer + 1, min(gate.layer + 1 + self.depth, gate.layers))
        named = [(layer, e, 0) for layer in ahead for e in self.last.get((gate.request, layer), ())]
        self.last[gate.request, gate.layer] = gate.ids[-1]
        return named


class Coactivation(PrefetchModel):
    """Every pair of a last token's experts in neighbouring layers is kept; the demanded vote."""

    def __init__(self, factor: str) -> None:
        self.factor, self.pairs = Fraction(factor), list[tuple[int, int, int]]()
        self.before: Sequence[int] = ()

    def names(self, gate: Gate) -> list[Name]:
        if gate.layer > 0:
            self.pairs += [(gate.layer, one, other) for one in self.before for other in gate.ids[-1]]
        self.before, target = gate.ids[-1], gate.layer + 1
        votes = Counter[int]()
        for layer, one, other in self.pairs:
            if layer == target:
                votes[other] += gate.demand[one]
        return [(target, e, 0) for e in most(votes, math.ceil(self.factor * gate.k))]


class Frequent(PrefetchModel):
    """The passes in which each expert was used."""

    def __init__(self, factor: str, depth: int) -> None:
        self.factor, self.depth, self.uses = Fraction(factor), depth, Counter[tuple[int, int]]()

    def names(self, gate: Gate) -> list[Name]:
        self.uses.update((gate.layer, e) for e in gate.demand)
        found = []
        for layer in range(gate.layer + 1, min(gate.layer + 1 + self.depth, gate.layers)):
            uses = Counter({e: n for (at, e), n in self.uses.items() if at == layer})
            found += [(layer, e, 0) for e in most(uses, math.ceil(self.factor * gate.k))]
        return found


def most(counts: Counter[int], count: int) -> list[int]:
    """The `count` of largest positive count, ties to the lowest id."""
    return sorted((e for e in counts if counts[e] > 0), key=lambda e: (-counts[e], e))[:count]


class AdaptiveDepth(PrefetchModel):
    """Layer after layer until one is not wholly there."""

    def __init__(self, p: int, t1: str = "1", t2: str = "1") -> None:
        self.p, self.t1, self.t2 = p, Fraction(t1), Fraction(t2)

    def names(self, gate: Gate) -> list[Name]:
        found: list[Name] = []
        for distance in range(1, min(self.p, gate.layers - 1 - gate.layer) + 1):
            layer, rows = gate.layer + distance, gate.look[distance - 1]
            tiers = [self.tiers(row, gate) for row in rows]
            order = named(rows, [list(each) for each in tiers])
            wanted = [(layer, e, min(each[e] for each in tiers if e in each)) for e in order]
            found += wanted
            if any(gate.coming.get(name[:2], 99) > name[2] for name in wanted):
                return found
        return found

    def tiers(self, row: Sequence[int], gate: Gate) -> dict[int, int]:
        """Precision by expert for a token's top k: by the share of its top k's score before it."""
        top, tiers = best(row, gate.k), {}
        for j, e in enumerate(top):
            before, whole = sum(row[other] for other in top[:j]), sum(row[other] for other in top)
            if before <= self.t1 * whole:
                tiers[e] = 0
            elif before <= self.t2 * whole:
                tiers[e] = gate.precisions - 1
        return tiers


class Confident(PrefetchModel):
    """After a miss: of the top k, what is (1 + alpha) times as likely as the next one."""

    def __init__(self, alpha: str, always: bool = False) -> None:
        self.alpha, self.always = Fraction(alpha), always

    def names(self, gate: Gate) -> list[Name]:
        missed = any((gate.layer, e) not in gate.here for e in gate.demand)
        if gate.layer + 1 == gate.layers or not (missed or self.always):
            return []
        picks = []
        for row in gate.look[0]:
            ranked = best(row, len(row))
            picks.append([e for e in ranked[: gate.k] if row[e] >= (1 + self.alpha) * row[ranked[gate.k]]])
        return [(gate.layer + 1, e, 0) for e in named(gate.look[0], picks)]


class Demanded(PrefetchModel):
    """The oracle without a fault."""

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    def names(self, gate: Gate) -> list[Name]:
        ahead = range(gate.layer + 1, min(gate.layer + 1 + self.horizon, gate.layers))
        return [(layer, e, 0) for layer in ahead for e in gate.later[layer]]


class Missed(PrefetchModel):
    """Every miss that was not fetched is written down, and struck out when its expert becomes resident."""

    def __init__(self, of: str = "cpu", top: int = 0, after: int = 1, per_step: int = 0) -> None:
        self.of, self.top, self.after, self.per_step = of, top, after, per_step
        self.missed: list[tuple[int, int]] = []

    def names(self, gate: Gate) -> list[Name]:
        self.missed = [at for at in self.missed if at not in gate.arrived]
        meant = [e for e in gate.later[gate.layer] if gate.unfetched.get(e) and self.of in ("any", gate.unfetched[e])]
        self.missed += [(gate.layer, e) for e in meant]
        first = meant[: self.top] if self.top else meant
        often = [e for e in first if self.missed.count((gate.layer, e)) >= self.after]
        return [(gate.layer, e, 0) for e in (often[: self.per_step] if self.per_step else often)]


Matrix = dict[tuple[int, int], int]  #: (layer, expert) -> tokens


class ActivationMatrix(PrefetchModel):
    """Whole matrices in a list, compared afresh at every gate."""

    def __init__(self, kept: int, everything: bool, experts: int) -> None:
        self.kept, self.everything, self.experts = kept, everything, experts
        self.past, self.current, self.request = list[Matrix](), Matrix(), -1

    def names(self, gate: Gate) -> list[Name]:
        if gate.request != self.request:
            if self.request >= 0:
                self.past = [*self.past, self.current][-self.kept :]
            self.request, self.current = gate.request, Matrix()
        for e, tokens in gate.demand.items():
            self.current[gate.layer, e] = self.current.get((gate.layer, e), 0) + tokens
        if not self.past:
            return []
        nearest = max(reversed(self.past), key=lambda past: self.similarity(past, gate.layers))
        later = [(layer, e) for layer in range(gate.layer + 1, gate.layers) for e in range(self.experts)]
        wanted = [at for at in later if self.everything or nearest.get(at, 0) > 0]
        return [(*at, 0) for at in sorted(wanted, key=lambda at: (-self.priority(nearest, gate, at), at))]

    def row(self, matrix: Matrix, layer: int) -> list[int]:
        """A layer's counts."""
        return [matrix.get((layer, e), 0) for e in range(self.experts)]

    def similarity(self, past: Matrix, layers: int) -> float:
        """The sum over layers of the cosine of their rows."""
        return sum(cosine(self.row(self.current, layer), self.row(past, layer)) for layer in range(layers))

    def priority(self, nearest: Matrix, gate: Gate, at: tuple[int, int]) -> float:
        """(share + 1e-8) * (1 - distance / (L + 1))."""
        whole = sum(self.row(nearest, at[0]))
        share = nearest.get(at, 0) / whole if whole else 0.0
        return (share + 1e-8) * (1.0 - (at[0] - gate.layer) / (gate.layers + 1.0))


def cosine(one: Sequence[int], other: Sequence[int]) -> float:
    """0 where either is empty."""
    lengths = [sum(number * number for number in row) for row in (one, other)]
    if 0 in lengths:
        return 0.0
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.sqrt(lengths[0]) * math.sqrt(lengths[1]))


Maker = Callable[[], PrefetchModel]
