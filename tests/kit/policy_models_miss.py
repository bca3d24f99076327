"""Slow, obvious models of the miss policies, written from their definitions and not from the code under test.

A model says for a step which precision each demanded expert needs (`wants`) and what becomes of the missing (`serve`):
a precision, DROP, CPU or, expert by expert and token by token, another expert.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

CPU, DROP = "cpu", "drop"
Verdict = int | str
UNIT = 2**24


class Step(NamedTuple):
    """A step's tokens and their demand."""

    decode: bool
    ids: list[list[int]]  #: token -> experts in rank order
    weights: list[list[int]]  #: token -> their gate weights in UNITs
    probabilities: list[list[int]]  #: token -> router probability in UNITs by expert
    logits: list[list[float]]  #: token -> by expert
    demand: list[int]  #: in demand order
    sizes: Sequence[int]  #: bytes of a copy by precision

    def tokens_of(self, e: int) -> list[int]:
        """Tokens that use e."""
        return [t for t, row in enumerate(self.ids) if e in row]

    def weight(self, t: int, e: int) -> int:
        """The gate weight of a token's expert."""
        return self.weights[t][self.ids[t].index(e)]

    def largest(self, e: int) -> int:
        """Its largest gate weight."""
        return max(self.weight(t, e) for t in self.tokens_of(e))

    def rank(self, e: int) -> int:
        """Its best rank, from 0."""
        return min(self.ids[t].index(e) for t in self.tokens_of(e))


class MissModel:
    """The interface of every miss model."""

    bits: tuple[float, ...] = (8,)

    def wants(self, step: Step) -> list[int]:
        """By place in the demand."""
        return [0] * len(step.demand)

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        """By place in `missing`, which are places in the demand."""
        raise NotImplementedError


class LowestBit(MissModel):
    """The last of the precisions."""

    def __init__(self, *bits: float) -> None:
        self.bits = bits

    def wants(self, step: Step) -> list[int]:
        return [len(self.bits) - 1] * len(step.demand)

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        return [len(self.bits) - 1] * len(missing)


class Hobbit(MissModel):
    """By the share of a token's weight before the expert; the best token counts."""

    def __init__(self, t1: str, t2: str, *bits: float) -> None:
        self.t1, self.t2, self.bits = Fraction(t1), Fraction(t2), bits

    def share_before(self, step: Step, t: int, e: int) -> Fraction:
        """Sorted by weight, ties by rank: what lies before e."""
        row = step.ids[t]
        order = sorted(row, key=lambda other: (-step.weight(t, other), row.index(other)))
        before = sum(step.weight(t, other) for other in order[: order.index(e)])
        return Fraction(before, sum(step.weights[t]))

    def rating(self, step: Step, e: int) -> Verdict:
        """High, low or skip."""
        share = min(self.share_before(step, t, e) for t in step.tokens_of(e))
        return 0 if share <= self.t1 else len(self.bits) - 1 if share <= self.t2 else DROP

    def wants(self, step: Step) -> list[int]:
        ratings = [self.rating(step, e) for e in step.demand]
        return [len(self.bits) - 1 if isinstance(rating, str) else rating for rating in ratings]

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        return [self.rating(step, step.demand[n]) for n in missing]


class DropCascade(MissModel):
    """Steps down by importance, or to what fits; the last step is to skip."""

    def __init__(self, bits: tuple[float, ...], below: tuple[str, ...], keep: int, pressure: bool = False) -> None:
        self.bits, self.below, self.keep, self.pressure = bits, below, keep, pressure

    def steps_down(self, step: Step, n: int) -> int:
        """In how many of the bottom shares the n-th is, the last of them counts."""
        left = len(step.demand) - n
        return max(
            [i + 1 for i, share in enumerate(self.below) if left <= Fraction(share) * len(step.demand)], default=0
        )

    def wants(self, step: Step) -> list[int]:
        lowest = len(self.bits) - 1
        return [lowest if self.pressure else min(lowest, self.steps_down(step, n)) for n in range(len(step.demand))]

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for n in missing:
            tier: int | None = self.steps_down(step, n)
            if self.pressure:
                tier = next((tier for tier, size in enumerate(step.sizes) if size <= free), None)
            if tier is None or tier >= len(self.bits):
                tier = len(self.bits) - 1 if step.rank(step.demand[n]) < self.keep else None
            verdicts.append(DROP if tier is None else tier)
            free -= 0 if tier is None else step.sizes[tier]
        return verdicts


class Drop(MissModel):
    """Skip what no token ranks among its first `keep`."""

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        return [0 if step.rank(step.demand[n]) < self.keep else DROP for n in missing]


class Split(MissModel):
    """The first share is fetched, at least one."""

    def __init__(self, q: str) -> None:
        self.q = Fraction(q)

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        fetched = max(1, int(self.q * len(missing) + Fraction(1, 2)))
        return [0 if m < fetched else CPU for m in range(len(missing))]


class DropBelow(MissModel):
    """Skip what weighs less than f / k for every token."""

    def __init__(self, f: str, share: bool) -> None:
        self.f, self.share = Fraction(f), share

    def matters(self, step: Step, e: int) -> bool:
        """For any token."""
        whole = [sum(step.weights[t]) if self.share else UNIT for t in range(len(step.ids))]
        k = len(step.ids[0])
        return any(step.weight(t, e) >= self.f / k * whole[t] for t in step.tokens_of(e))

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        return [0 if self.matters(step, step.demand[n]) else DROP for n in missing]


class AllOnCpu(MissModel):
    """Nothing is fetched."""

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        return [CPU] * len(missing)


class Fiddler(MissModel):
    """The CPU where it is sooner done, one by one or together."""

    def __init__(self, ratio: str, together: bool, decode_on_cpu: bool) -> None:
        self.ratio, self.together, self.decode_on_cpu = Fraction(ratio), together, decode_on_cpu

    def serve(self, step: Step, missing: list[int], free: int) -> list[Verdict]:
        if step.decode and self.decode_on_cpu:
            return [CPU] * len(missing)
        tokens = [len(step.tokens_of(step.demand[n])) for n in missing]
        if not self.together:
            return [CPU if count < self.ratio else 0 for count in tokens]
        order = sorted(range(len(missing)), key=lambda m: (tokens[m], -m))

        def ends(taken: int) -> Fraction:
            return max(Fraction(sum(tokens[m] for m in order[:taken])), self.ratio * (len(order) - taken))

        taken = min(range(len(order) + 1), key=ends)
        return [CPU if m in order[:taken] else 0 for m in range(len(missing))]


class Band:
    """SMoE: who may stand in for whom."""

    def __init__(self, alpha: str, prefill_too: bool, ratio: str | None = None) -> None:
        self.alpha, self.prefill_too = Fraction(alpha), prefill_too
        self.ratio = None if ratio is None else Fraction(ratio)

    def outside(self, step: Step, t: int) -> int:
        """The best score that the token left out."""
        return max(score for e, score in enumerate(step.probabilities[t]) if e not in step.ids[t])

    def is_top(self, step: Step, t: int, e: int) -> bool:
        """Clearly above what the token left out."""
        return e in step.ids[t] and step.probabilities[t][e] > (1 + self.alpha) * self.outside(step, t)

    def stand_in(self, step: Step, t: int, e: int, row: Sequence[int], resident: Collection[int]) -> int | None:
        """For e in a token's row as it is by now."""
        if any(self.is_top(step, other, e) for other in range(len(step.ids))):
            return None
        scores, best = step.probabilities[t], self.outside(step, t)
        band = [o for o in resident if o not in row and (1 - self.alpha) * best < scores[o] <= best]
        return min(band, key=lambda o: (-scores[o], o), default=None)

    def split(self, waiting: Sequence[int], step: Step) -> list[int]:
        """Algorithm 2: which of the waiting, best first, the CPU takes."""
        link, cpu, taken = Fraction(0), Fraction(0), list[int]()
        left = [] if self.ratio is None else list(waiting)
        while left:
            if link <= cpu:
                left.pop(0)
                link += self.ratio or 0
            else:
                taken.append(left.pop())
                cpu += len(step.tokens_of(taken[-1]))
        return taken


class Tolerant(Band):
    """The best-scored resident that the token does not use may stand in, if it scores at most so much less."""

    def __init__(self, tolerance: str) -> None:
        super().__init__("0", prefill_too=True)
        self.tolerance = Fraction(tolerance)

    def stand_in(self, step: Step, t: int, e: int, row: Sequence[int], resident: Collection[int]) -> int | None:
        scores = step.probabilities[t]
        near = [o for o in resident if o not in row and scores[o] >= scores[e] - self.tolerance * UNIT]
        return min(near, key=lambda o: (-scores[o], o), default=None)
