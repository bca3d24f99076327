"""Replays against slow models of the policies' definitions: every access, and every token's experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.traces.routers import weigh
from moereplay.traces.schema import Trace
from tests.kit.every import every
from tests.kit.policy_catalogue import by_policy
from tests.kit.policy_models import (
    RANKS,
    UNIT,
    Arc,
    Belady,
    DemandStep,
    Fifo,
    Lru,
    Model,
    Mru,
    Ranked,
    Sieve,
    one_token_steps,
    play,
    substitutes,
)
from tests.kit.policy_models_routing import CachePrior
from tests.kit.policy_runs import Nanoseconds, Outcome, Sizes, random_trace, replayed

seeds = st.integers(0, 2**32)
times = st.builds(Nanoseconds, *[st.integers(1, 7)] * 4, st.just(1.0))
CONTRACTS = ("atomic", "sequential")
few = settings(max_examples=40, deadline=None, derandomize=True)

Maker = Callable[[int, list[int]], Model]
MODELS: dict[str, Maker] = {
    "lru": lambda slots, stream: Lru(slots),
    "mru": lambda slots, stream: Mru(slots),
    "fifo": lambda slots, stream: Fifo(slots),
    "sieve": lambda slots, stream: Sieve(slots),
    "belady": lambda slots, stream: Belady(slots, stream, bypass=False),
    "belady:bypass=true": lambda slots, stream: Belady(slots, stream, bypass=True),
    **{name: lambda slots, stream, rank=rank: Ranked(slots, rank) for name, rank in RANKS.items()},
}


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Up to three layers of up to six experts, and up to twenty one-token passes."""
    experts = draw(st.integers(2, 6))
    return Sizes(draw(st.integers(1, 3)), experts, draw(st.integers(1, min(3, experts))), draw(st.integers(1, 20)))


def expected(trace: Trace, make: Maker, slots: int, scope: str, contract: str) -> list[bool]:
    steps = one_token_steps(trace)
    return play(steps, [make(slots, stream) for stream in streams(steps, scope)], contract)


def streams(steps: list[DemandStep], scope: str) -> list[list[int]]:
    """The demand that each pool sees."""
    if scope == "global":
        return [[x for step in steps for x in step.demand]]
    layers = steps[0].layers
    return [[x for step in steps if step.layer == layer for x in step.demand] for layer in range(layers)]


# -- eviction -----------------------------------------------------------------------------------------------------


@by_policy(MODELS)
@few
@given(seed=seeds, sizes=sizes(), spare=st.integers(0, 6), scope=st.sampled_from(["global", "per_layer"]), times=times)
def test_evictions_hit_and_miss_as_their_models(
    texts: tuple[str, ...], seed: int, sizes: Sizes, spare: int, scope: str, times: Nanoseconds
):
    """Pools from one step's demand upwards; what a step needs always fits."""
    trace, slots = random_trace(seed, sizes), sizes.k + spare
    for text, contract in product(texts, CONTRACTS):
        outcome = replayed(trace, slots, times, eviction=text, contract=contract, scope=scope)
        model = expected(trace, MODELS[text], slots, scope, contract)
        assert [access.hit for access in outcome.accesses] == model, (text, contract)


@pytest.mark.long
@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=seeds, sizes=sizes(), slots=st.integers(1, 9), scope=st.sampled_from(["global", "per_layer"]))
def test_arc_hits_and_misses_as_its_pseudo_code(seed: int, sizes: Sizes, slots: int, scope: str):
    """Experts of one byte: the target is then the same float, counted in bytes or in slots."""
    trace = random_trace(seed, sizes._replace(tokens=3 * sizes.tokens, size=1))
    outcome = replayed(trace, slots, eviction="arc", contract="sequential", scope=scope)
    model = expected(trace, lambda slots, stream: Arc(slots), slots, scope, "sequential")
    assert [access.hit for access in outcome.accesses] == model


@every("contract", CONTRACTS)
@few
@given(seed=seeds, sizes=sizes(), spare=st.integers(0, 6), times=times)
def test_least_stale_in_order_of_last_access_is_lru_without_prefetch(
    contract: str, seed: int, sizes: Sizes, spare: int, times: Nanoseconds
):
    """What was touched in this pass was touched later than what was not: the class adds nothing to the timestamp."""
    trace, given = random_trace(seed, sizes), {"contract": contract, "reset": "7"}
    lru = replayed(trace, sizes.k + spare, times, eviction="lru", **given)
    assert replayed(trace, sizes.k + spare, times, eviction="least_stale:order=b", **given) == lru


def test_random_evictions_are_uniform_and_follow_the_seed():
    """Four of five experts stay and take turns, so each of the residents should be evicted a quarter of the time."""
    trace = random_trace(1, Sizes(layers=1, experts=5, k=1, tokens=4000))
    log = [replayed(trace, 4, eviction="random", seed=seed).events for seed in (0, 0, 1)]
    assert log[0] == log[1] != log[2]
    evicted = Counter(event.expert for event in log[0] if event.kind == "evict")
    # five experts are alike: each takes a fifth of about 800 evictions, three deviations either way
    share = sum(evicted.values()) / 5
    assert all(abs(count - share) < 3 * (share * 0.8) ** 0.5 for count in evicted.values())


# -- routing ------------------------------------------------------------------------------------------------------

ROUTED = Sizes(layers=2, experts=6, k=2, tokens=14, prompt=5)
READINGS = ["running_range", "token_range", "ema_range", "running_mean"]


def units(weights: np.ndarray) -> list[list[int]]:
    return [[round(float(weight) * UNIT) for weight in row] for row in weights]


def passes_of(trace: Trace, prompt: int) -> list[range]:
    """Recorded passes: the prompt at once, then token by token."""
    return [range(prompt), *(range(t, t + 1) for t in range(prompt, trace.tokens))]


def demand_order(rows: list[list[int]], weights: list[list[int]]) -> list[int]:
    """By descending largest weight, then by id."""
    largest: dict[int, int] = {}
    for row, weight_row in zip(rows, weights, strict=True):
        for e, weight in zip(row, weight_row, strict=True):
            largest[e] = max(weight, largest.get(e, 0))
    return sorted(largest, key=lambda e: (-largest[e], e))


class RoutedByModel:
    """Replays cache-prior over one LRU per layer and keeps what each token ran."""

    def __init__(self, trace: Trace, prior: CachePrior, slots: int) -> None:
        self.ran, self.hits, self.trace = [], [], trace
        caches = [Lru(slots) for _ in range(trace.geometry.layers)]
        for rows in passes_of(trace, ROUTED.prompt):
            for layer, cache in enumerate(caches):
                self._step(rows, layer, cache, prior)

    def _step(self, rows: range, layer: int, cache: Lru, prior: CachePrior) -> None:
        logits, chosen = (self.trace.read(name, rows.start, rows.stop)[:, layer] for name in ("logits", "chosen"))
        snapshot = set(cache.residents)
        ids = [prior.choose(layer, z, row, snapshot) for z, row in zip(logits.tolist(), chosen.tolist(), strict=True)]
        demand = demand_order(ids, units(weigh(self.trace.geometry.router, logits, np.array(ids))))
        self.ran.append(ids)
        self.hits += play([DemandStep(0, 0, 1, 6, demand, {})], [cache], "atomic")


@every("delta", READINGS)
@few
@given(seed=seeds, lam=st.sampled_from([0.0, 0.125, 0.2, 0.5, 2.0]), top_j=st.integers(0, 3))
def test_cache_prior_routes_as_its_model(delta: str, seed: int, lam: float, top_j: int):
    """Tokens of a prefill pass see one snapshot of the cache, while the running scale moves on token by token."""
    trace = random_trace(seed, ROUTED)
    routing = f"cache_prior:lam={lam}:top_j={top_j}:delta={delta}"
    outcome = replayed(trace, 6, routing=routing, scope="per_layer")
    model = RoutedByModel(trace, CachePrior(lam, top_j, delta), 6)
    assert outcome.ran == model.ran
    assert [access.hit for access in outcome.accesses] == model.hits


@every("delta", READINGS)
@settings(few, max_examples=15)
@given(seed=seeds)
def test_cache_prior_without_lift_is_standard_to_the_last_event(delta: str, seed: int):
    """Logits are full of ties, which the recorded order breaks: recomputing the top-k would break them otherwise."""
    trace = random_trace(seed, ROUTED)
    standard = replayed(trace, 4, routing="standard")
    assert replayed(trace, 4, routing=f"cache_prior:lam=0:delta={delta}") == standard


# -- substitution -------------------------------------------------------------------------------------------------


class SubstitutedByModel:
    """One LRU for all layers with substitution at every gate: what each token ran, and how many were replaced."""

    def __init__(self, trace: Trace, slots: int, slack: int) -> None:
        self.trace, self.cache, self.slack = trace, Lru(slots), slack
        self.ran, self.hits, self.replaced = [], [], 0
        for rows in passes_of(trace, ROUTED.prompt):
            for layer in range(trace.geometry.layers):
                self._step(rows, layer)

    def _step(self, rows: range, layer: int) -> None:
        logits, chosen = (self.trace.read(name, rows.start, rows.stop)[:, layer] for name in ("logits", "chosen"))
        router, base = self.trace.geometry.router, layer * ROUTED.experts
        ids = chosen.tolist()
        demand = demand_order(ids, units(weigh(router, logits, chosen)))
        resident = {x - base for x in self.cache.residents if base <= x < base + ROUTED.experts}
        self.hits += [e in resident for e in demand]
        everyone = np.tile(np.arange(ROUTED.experts), (len(ids), 1))
        scores = units(weigh(router.model_copy(update={"renormalise": False}), logits, everyone))
        missing = [e for e in demand if e not in resident]
        self.replaced += substitutes(ids, scores, missing, resident, self.slack)
        final = demand_order(ids, units(weigh(router, logits, np.array(ids))))
        play([DemandStep(0, 0, 1, 6, [base + e for e in final], {})], [self.cache], "atomic")
        self.ran.append(ids)


@few
@given(seed=seeds, spare=st.integers(0, 6), sixteenths=st.sampled_from([0, 1, 2, 4, 16]))
def test_substitution_runs_as_its_model(seed: int, spare: int, sixteenths: int):
    """Five tokens of prefill, nine of decode: each finds a stand-in of its own, or the expert is fetched."""
    trace, slots = random_trace(seed, ROUTED), ROUTED.experts + spare
    outcome: Outcome = replayed(trace, slots, miss=f"substitute:tolerance={sixteenths / 16}")
    model = SubstitutedByModel(trace, slots, sixteenths * UNIT // 16)
    assert outcome.ran == model.ran
    assert [access.hit for access in outcome.accesses] == model.hits
    assert outcome.totals["substituted"] == model.replaced
