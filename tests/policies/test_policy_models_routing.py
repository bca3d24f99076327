"""Replays of routing policies against slow models of their definitions: every token's experts, every access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moereplay.traces.demand import union_of
from moereplay.traces.routers import scores, to_units, weigh
from moereplay.traces.schema import Trace
from tests.kit.policy_catalogue import by_policy
from tests.kit.policy_models import DemandStep, Lru, play
from tests.kit.policy_models_routing import (
    Bounded,
    CachePrior,
    Cumulative,
    Gate,
    Keep,
    MaxRank,
    Piggyback,
    Prune,
    PruneRank,
    ReuseDistance,
    RoutingModel,
    SwapNext,
    Token,
)
from tests.kit.policy_runs import Sizes, random_trace, replayed, replayed_by_compiled
from tests.kit.search import searched

#: A prompt of two tokens demands up to six experts of nine; six slots per layer hold any step, and evict.
SIZES = Sizes(layers=2, experts=9, k=3, tokens=14, prompt=2)
SLOTS = 6
#: What `keep:profile=given` keeps: less than k of the second layer, in no order.
LISTED = ((0, 7), (1, 4), (0, 0), (0, 3), (1, 8), (0, 5))
seeds = st.integers(0, 2**32)


class RoutedByModel:
    """Replays a model over one LRU per layer and keeps what each token ran, and every access."""

    def __init__(self, trace: Trace, model: RoutingModel) -> None:
        self.ran, self.hits, self._trace, self._model = [], [], trace, model
        model.knows(trace)
        caches = [Lru(SLOTS) for _ in range(trace.geometry.layers)]
        prompt = [range(SIZES.prompt)] if SIZES.prompt else []
        for number, rows in enumerate([*prompt, *(range(t, t + 1) for t in range(SIZES.prompt, trace.tokens))]):
            for layer, cache in enumerate(caches):
                self._step(Gate(number, layer, number >= len(prompt)), rows, cache)

    def _step(self, gate: Gate, rows: range, cache: Lru) -> None:
        router, (logits, chosen) = self._trace.geometry.router, self._read(gate.layer, rows)
        snapshot = set(cache.residents)
        rows_read = zip(logits.tolist(), to_units(scores(router, logits)).tolist(), chosen.tolist(), strict=True)
        tokens = [Token(*said) for said in rows_read]
        self._model.begin(gate, tokens)
        ids = [self._model.choose(gate, token, snapshot) for token in tokens]
        demand = union_of(ids, to_units(weigh(router, logits, np.array(ids))).tolist()).expert
        self.ran.append(ids)
        self.hits += play([DemandStep(0, 0, 1, SIZES.experts, list(demand), {})], [cache], "atomic")
        self._model.used(gate, demand)

    def _read(self, layer: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        logits, chosen = (self._trace.read(name, rows.start, rows.stop)[:, layer] for name in ("logits", "chosen"))
        return logits, chosen


MODELS: dict[str, Callable[[], RoutingModel]] = {}
for m, top_j in product((1, 4, 6, 20), (0, 2, 5)):
    MODELS[f"max_rank:m={m}:top_j={top_j}"] = partial(MaxRank, m, top_j)
for p, top_j in product(("0", "0.5", "0.75", "0.9", "1"), (0, 2)):
    MODELS[f"cumulative:p={p}:top_j={top_j}"] = partial(Cumulative, p, top_j)
for predict, keep, phase in product(("recency", "interval"), (1, 2, 4), ("decode", "any")):
    MODELS[f"reuse_distance:predict={predict}:keep={keep}:phase={phase}"] = partial(ReuseDistance, predict, keep, phase)
READINGS = ("running_range", "token_range", "ema_range", "running_mean")
for delta, (lam, top_j) in product(READINGS, ((0.125, 3), (0.2, 1), (0.5, 0), (2.0, 2))):
    MODELS[f"cache_prior:lam={lam}:top_j={top_j}:delta={delta}"] = partial(CachePrior, lam, top_j, delta)
for regret, swaps, m, of in product(("0.03125", "0.25"), (1, 2, 3), (0, 4, 9), ("mass", "score")):
    MODELS[f"bounded:regret={regret}:swaps={swaps}:m={m}:of={of}"] = partial(Bounded, float(regret), swaps, m, of)
for keep, also, phase in product((1, 2, 3), ("none", "resident"), ("decode", "any")):
    MODELS[f"piggyback:keep={keep}:also={also}:phase={phase}"] = partial(Piggyback, keep, also, phase)
MODELS["keep:profile=given"] = partial(Keep, listed=LISTED)
MODELS |= {
    f"keep:share={share}:tokens={n}": partial(Keep, share=share, tokens=n) for share in (0.2, 0.7) for n in (0, 5)
}
MODELS |= {f"prune:keep={keep}": partial(Prune, keep) for keep in (1, 2, 3)}
MODELS |= {f"prune_rank:rank={rank}": partial(PruneRank, rank) for rank in (1, 3, 4)}
MODELS |= {f"swap:rank={rank}:by=next": partial(SwapNext, rank) for rank in (1, 3, 4)}


@by_policy(MODELS)
@searched(8)
@given(seed=seeds)
def test_routing_runs_as_its_model(texts: tuple[str, ...], seed: int):
    """Tokens of the prompt see one snapshot of the cache, while what a policy learns moves on from token to token.

    Logits tie, and the recorded order breaks ties at random.
    """
    trace = random_trace(seed, SIZES)
    for text in texts:
        given = {"routing": text, "scope": "per_layer", "profile": LISTED}
        outcome, model = replayed(trace, SLOTS, **given), RoutedByModel(trace, MODELS[text]())
        assert outcome.ran == model.ran, text
        assert [access.hit for access in outcome.accesses] == model.hits, text


@searched(12)
@given(seed=seeds)
def test_a_window_of_k_is_standard_to_the_last_event(seed: int):
    trace = random_trace(seed, SIZES)
    standard = replayed(trace, 4, routing="standard")
    unchanging = ["max_rank:m=3", "max_rank:m=1:top_j=0", "cumulative:p=0", "prune:keep=3", "piggyback:keep=3"]
    unchanging += ["bounded:swaps=0", "bounded:regret=0", "bounded:m=3"]
    for routing in (*unchanging, *(f"cache_prior:lam=0:delta={delta}" for delta in READINGS)):
        assert replayed(trace, 4, routing=routing) == standard, routing


@searched(12)
@given(seed=seeds, rank=st.integers(1, 4))
def test_swap_changes_one_slot_to_an_expert_that_was_not_chosen(seed: int, rank: int):
    trace = random_trace(seed, SIZES)
    own, ran = (replayed(trace, SLOTS, routing=text).ran for text in ("standard", f"swap:rank={rank}"))
    for row, swapped in zip(chain(*own), chain(*ran), strict=True):
        differ = [j for j in range(SIZES.k) if row[j] != swapped[j]]
        assert differ == ([rank - 1] if rank <= SIZES.k else [])
        assert all(swapped[j] not in row for j in differ)


def test_swap_draws_evenly_and_follows_both_seeds():
    """Over 3000 one-expert tokens each of the five others comes in about a fifth of the time."""
    sizes = Sizes(layers=1, experts=6, k=1, tokens=3000)
    trace = random_trace(1, sizes)
    own, ran, *others = (
        list(chain(*replayed_by_compiled(trace, 6, routing=routing, seed=seed).ran))
        for routing, seed in [("standard", 0), ("swap:rank=1", 0), ("swap:rank=1:seed=1", 0), ("swap:rank=1", 1)]
    )
    assert ran not in others
    assert others[0] != others[1]
    steps = Counter((new[0] - old[0]) % 6 for old, new in zip(own, ran, strict=True))
    assert set(steps) == {1, 2, 3, 4, 5}
    assert all(abs(count - 600) < 4 * (600 * 4 / 5) ** 0.5 for count in steps.values())
