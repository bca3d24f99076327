"""Slow, obvious models of the routing policies, written from their definitions and not from the code under test.

A model is called token by token: `choose(gate, scores, probabilities, ids, resident)` gives the token's row, -1 for an
empty slot; `used` is called afterwards with what the step ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from moereplay.traces.schema import Trace
from tests.kit.policy_models import UNIT


class Gate(NamedTuple):
    """Where a token is routed."""

    step_pass: int
    layer: int
    decode: bool


class Token(NamedTuple):
    """The router's output for a token."""

    scores: Sequence[float]  #: choice scores by expert
    probabilities: Sequence[int]  #: router probabilities in UNITs by expert
    ids: Sequence[int]  #: its own choice in rank order


def by_rank(token: Token) -> list[int]:
    """Every expert: the chosen as recorded, then the others by score, ties by id."""
    others = [e for e in range(len(token.scores)) if e not in token.ids]
    return [*token.ids, *sorted(others, key=lambda e: (-token.scores[e], e))]


class RoutingModel:
    """The interface of every routing model."""

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        """The token's row."""
        raise NotImplementedError

    def knows(self, trace: Trace) -> None:
        """Take the trace that will be replayed."""

    def begin(self, gate: Gate, tokens: Sequence[Token]) -> None:
        """A gate opens for the tokens of a pass."""

    def used(self, gate: Gate, experts: Collection[int]) -> None:
        """The layer's experts that the step ran."""


class MaxRank(RoutingModel):
    """Reorder ranks top_j + 1 to m: the resident first."""

    def __init__(self, m: int, top_j: int) -> None:
        self.m, self.top_j = m, top_j

    def window(self, token: Token) -> int:
        """Return the number of ranks that may take part."""
        return max(self.m, len(token.ids))

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        ranks = by_rank(token)
        kept, rest = ranks[: self.top_j], ranks[self.top_j : self.window(token)]
        preferred = [*kept, *(e for e in rest if e in resident), *(e for e in rest if e not in resident)]
        return sorted(preferred[: len(token.ids)], key=ranks.index)


class Cumulative(MaxRank):
    """The window is the shortest prefix that holds a share p of the probability."""

    def __init__(self, p: str, top_j: int) -> None:
        super().__init__(0, top_j)
        self.p = Fraction(p)

    def window(self, token: Token) -> int:
        held = [token.probabilities[e] for e in by_rank(token)]
        shortest = next(n for n in range(len(held) + 1) if sum(held[:n]) >= self.p * sum(held))
        return max(shortest, len(token.ids))


class CachePrior(RoutingModel):
    """z' = z + lam * delta * [resident or among the original top J]; delta by its reading, per layer."""

    def __init__(self, lam: float, top_j: int, delta: str) -> None:
        self.lam, self.top_j, self.delta = lam, top_j, delta
        self.seen = dict[int, list[float]]()
        self.average = dict[int, float]()

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        """Equal scores stay in the recorded order, then by id."""
        lifted = {*resident, *token.ids[: self.top_j]}
        lift = self.lam * self._scale(gate.layer, token.scores)
        biased = [z + lift if e in lifted else z for e, z in enumerate(token.scores)]
        recorded = [*token.ids, *(e for e in range(len(biased)) if e not in token.ids)]
        chosen = sorted(recorded, key=lambda e: -biased[e])[: len(token.ids)]
        return [e for e in by_rank(token) if e in chosen]

    def _scale(self, layer: int, scores: Sequence[float]) -> float:
        spread, seen = max(scores) - min(scores), self.seen.setdefault(layer, [])
        if self.delta == "token_range":
            return spread
        if self.delta == "ema_range":
            old = self.average.get(layer, spread)
            self.average[layer] = spread if old == spread else 0.99 * old + (1.0 - 0.99) * spread
            return self.average[layer]
        seen.append(sum(scores) / len(scores) if self.delta == "running_mean" else spread)
        return sum(seen) / len(seen)


class ReuseDistance(RoutingModel):
    """Lift the resident by how soon they come back; leave out what is beyond `keep` and absent."""

    def __init__(self, predict: str, keep: int, phase: str) -> None:
        self.predict, self.keep, self.phase = predict, keep, phase
        self.gates, self.last, self.uses = dict[int, int](), dict[tuple, int](), dict[tuple, int]()

    def begin(self, gate: Gate, tokens: Sequence[Token]) -> None:
        self.gates[gate.layer] = self.gates.get(gate.layer, 0) + 1

    def used(self, gate: Gate, experts: Collection[int]) -> None:
        for e in experts:
            self.last[gate.layer, e] = gate.step_pass
            self.uses[gate.layer, e] = self.uses.get((gate.layer, e), 0) + 1

    def distance(self, gate: Gate, e: int) -> float:
        """Passes to its next use, as far as one can tell."""
        if self.predict == "recency":
            return gate.step_pass - self.last[gate.layer, e]
        return self.gates[gate.layer] / self.uses[gate.layer, e]

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        if self.phase == "decode" and not gate.decode:
            return list(token.ids)
        away = {e: self.distance(gate, e) for e in resident}
        delta = token.scores[token.ids[0]] - token.scores[token.ids[-1]]
        longest = max(away.values(), default=0) or 1
        lift = {e: delta * (1 - away[e] / longest) for e in away}
        lifted = [z + lift.get(e, 0) for e, z in enumerate(token.scores)]
        recorded = [*token.ids, *(e for e in range(len(lifted)) if e not in token.ids)]
        best = sorted(recorded, key=lambda e: -lifted[e])[: len(token.ids)]
        kept = [e for place, e in enumerate(best) if place < self.keep or e in resident]
        return [e for e in by_rank(token) if e in kept] + [-1] * (len(best) - len(kept))


class Bounded(RoutingModel):
    """Swaps in the order of regret, then of both ranks; each expert is in one of them."""

    def __init__(self, regret: float, swaps: int, m: int, of: str) -> None:
        self.regret, self.swaps, self.m, self.of = regret, swaps, m, of

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        ranks, k = by_rank(token), len(token.ids)
        worth = [p / UNIT for p in token.probabilities] if self.of == "mass" else token.scores
        pairs = product(ranks[:k], ranks[k : self.m or 2 * k])
        cost = {(old, new): max(0, worth[old] - worth[new]) for old, new in pairs if new in resident}
        chosen = list(token.ids)
        for old, new in sorted(cost, key=lambda pair: (cost[pair], ranks.index(pair[1]), ranks.index(pair[0]))):
            legal = old not in resident and old in chosen and new not in chosen and cost[old, new] <= self.regret
            if legal and len(set(chosen) - set(token.ids)) < self.swaps:
                chosen[chosen.index(old)] = new
        return sorted(chosen, key=ranks.index)


class Piggyback(RoutingModel):
    """The best `keep`, and of what any token keeps the best others."""

    def __init__(self, keep: int, also: str, phase: str) -> None:
        self.keep, self.also, self.phase, self.tokens = keep, also, phase, list[Token]()

    def begin(self, gate: Gate, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        if self.phase == "decode" and not gate.decode:
            return list(token.ids)
        needed = {e for other in self.tokens for e in other.ids[: self.keep]}
        needed |= set(resident) if self.also == "resident" else set()
        others = [e for e in by_rank(token)[self.keep :] if e in needed]
        row = [*token.ids[: self.keep], *others][: len(token.ids)]
        return row + [-1] * (len(token.ids) - len(row))


class Keep(RoutingModel):
    """The best of what is listed, or of what the trace chose most often."""

    def __init__(self, listed: Sequence[tuple[int, int]] = (), share: float = 1, tokens: int = 0) -> None:
        self.share, self.tokens, self.kept = share, tokens, [{e for at, e in listed if at == n} for n in range(2)]

    def knows(self, trace: Trace) -> None:
        chosen = trace.read("chosen")[: self.tokens or None]
        for layer, kept in enumerate(self.kept):
            counts = Counter(chosen[:, layer].ravel().tolist())
            most = max(1, int(self.share * trace.geometry.experts))
            if self.share < 1:
                kept |= set(sorted(counts, key=lambda e, counts=counts: (-counts[e], e))[:most])

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        row = [e for e in by_rank(token) if e in self.kept[gate.layer]][: len(token.ids)]
        return row + [-1] * (len(token.ids) - len(row))


class Prune(RoutingModel):
    """The best `keep`."""

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        return [e if j < self.keep else -1 for j, e in enumerate(token.ids)]


class PruneRank(RoutingModel):
    """All but the expert of one rank (from 1)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        return [-1 if j == self.rank - 1 else e for j, e in enumerate(token.ids)]


class SwapNext(RoutingModel):
    """The expert of one rank (from 1) gives way to the best that was not chosen."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def choose(self, gate: Gate, token: Token, resident: Collection[int]) -> list[int]:
        best_other = by_rank(token)[len(token.ids)]
        return [best_other if j + 1 == self.rank else e for j, e in enumerate(token.ids)]
