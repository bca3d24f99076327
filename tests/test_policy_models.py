"""Every policy against a slow model of its definition, decision by decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policies
from policies.contract import CPU, DROP, NEVER, PER_TOKEN, Step
from policies.grammar import parse
from simulator.reference.bound import Bound, Shape, Tables
from tests.policy_models import (
    RANKS,
    UNIT,
    Arc,
    Belady,
    CachePrior,
    DemandStep,
    Fifo,
    Lru,
    Model,
    Ranked,
    above_percentile,
    above_running,
    best,
    cascade_tier,
    named,
    one_token_steps,
    play,
    substitutes,
)
from tests.policy_runs import Nanoseconds, Outcome, Sizes, geometry_of, random_trace, replayed
from traces.routers import weigh
from traces.schema import Trace

seeds = st.integers(0, 2**32)
times = st.builds(Nanoseconds, *[st.integers(1, 7)] * 4)
both_contracts = pytest.mark.parametrize("contract", ["atomic", "sequential"])
few = settings(max_examples=80, deadline=None, derandomize=True)

Maker = Callable[[int, list[int]], Model]
MODELS: dict[str, Maker] = {
    "lru": lambda slots, stream: Lru(slots),
    "fifo": lambda slots, stream: Fifo(slots),
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


@both_contracts
@pytest.mark.parametrize("name", MODELS)
@few
@given(seed=seeds, sizes=sizes(), spare=st.integers(0, 6), scope=st.sampled_from(["global", "per_layer"]), times=times)
def test_evictions_hit_and_miss_as_their_models(
    name: str, contract: str, seed: int, sizes: Sizes, spare: int, scope: str, times: Nanoseconds
):
    """Pools from one step's demand upwards; what a step needs always fits."""
    trace, slots = random_trace(seed, sizes), sizes.k + spare
    outcome = replayed(trace, slots, times, eviction=name, contract=contract, scope=scope)
    assert [access.hit for access in outcome.accesses] == expected(trace, MODELS[name], slots, scope, contract)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=seeds, sizes=sizes(), slots=st.integers(1, 9), scope=st.sampled_from(["global", "per_layer"]))
def test_arc_hits_and_misses_as_its_pseudo_code(seed: int, sizes: Sizes, slots: int, scope: str):
    """Experts of one byte: the target is then the same float, counted in bytes or in slots."""
    trace = random_trace(seed, sizes._replace(tokens=3 * sizes.tokens, size=1))
    outcome = replayed(trace, slots, eviction="arc", contract="sequential", scope=scope)
    model = expected(trace, lambda slots, stream: Arc(slots), slots, scope, "sequential")
    assert [access.hit for access in outcome.accesses] == model


def key_at(text: str, now: dict[str, int], **expert: int) -> int:
    """Expert 0 of layer 0, in a model of four layers; it was last used in pass 2, as the third use of all."""
    row = {"layer": 0, "needed": 0, "last_pass": 2, "hint_pass": -1, "last_use": 3, "next_use": 9} | expert
    asked = Asked("eviction", text)
    asked.tables.now.update(now)
    asked.tables.experts[0].update(row)
    return asked.bound.call(asked.bound.policy.key, 0)


def test_least_stale_leaves_a_layer_only_after_its_gate():
    """Between the step's start and its gate nobody knows who is needed: distance 0 of 4; afterwards a whole round, 4."""
    before, after = ({"pass": 5, "layer": 0, "gated": gated} for gated in (0, 1))
    assert key_at("least_stale", before) - key_at("least_stale", after) == 4
    assert key_at("least_stale", before) == key_at("least_stale", after, needed=1)


def test_least_stale_takes_what_a_prefetch_named_for_current():
    now = {"pass": 5, "layer": 1, "gated": 1}
    assert key_at("least_stale", now, hint_pass=5) == key_at("least_stale", now, last_pass=5)
    assert key_at("least_stale", now, hint_pass=4) == key_at("least_stale", now) < key_at("least_stale", now, hint_pass=5)


def admitted(text: str, prefetched: int, incoming: dict[str, int], leaving: dict[str, int]) -> bool:
    asked = Asked("eviction", text)
    asked.tables.now["pass"] = 5
    asked.tables.experts[0].update(incoming)
    asked.tables.experts[1].update(leaving)
    return asked.bound.call(asked.bound.policy.admit, 0, prefetched, 1)


@pytest.mark.parametrize(("text", "own", "other", "taken"), [
    ("belady:bypass=true", 8, 7, False),
    ("belady:bypass=true", 7, 8, True),
    ("belady:bypass=true", NEVER, NEVER, True),
    ("belady", NEVER, 7, True),
])  # fmt: skip
def test_belady_bypasses_what_comes_back_strictly_later(text: str, own: int, other: int, taken: bool):
    assert admitted(text, 0, {"next_use": own}, {"next_use": other}) == taken


@pytest.mark.parametrize("prefetched", [0, 1])
@pytest.mark.parametrize("last_pass", [4, 5])
@pytest.mark.parametrize("allowed", ["true", "false"])
def test_least_stale_may_guard_current_experts_from_prefetches(prefetched: int, last_pass: int, allowed: str):
    taken = admitted(f"least_stale:prefetch_evicts_current={allowed}", prefetched, {}, {"last_pass": last_pass})
    assert taken == (allowed == "true" or not prefetched or last_pass == 4)


@both_contracts
@few
@given(seed=seeds, sizes=sizes(), spare=st.integers(0, 6), times=times)
def test_least_stale_in_order_of_last_access_is_lru_without_prefetch(
    contract: str, seed: int, sizes: Sizes, spare: int, times: Nanoseconds
):
    """What was touched in this pass was touched later than what was not: the class adds nothing to the stamp."""
    trace, given = random_trace(seed, sizes), {"contract": contract, "reset": "7"}
    lru = replayed(trace, sizes.k + spare, times, eviction="lru", **given)
    assert replayed(trace, sizes.k + spare, times, eviction="least_stale:order=b", **given) == lru


def test_random_evictions_are_uniform_and_follow_the_seed():
    """Four of five experts stay and take turns, so each of the residents should leave a quarter of the time."""
    trace = random_trace(1, Sizes(layers=1, experts=5, k=1, tokens=4000))
    log = [replayed(trace, 4, eviction="random", seed=seed).events for seed in (0, 0, 1)]
    assert log[0] == log[1] != log[2]
    evicted = Counter(event.expert for event in log[0] if event.kind == "evict")
    # five experts are alike: each takes a fifth of about 800 evictions, three deviations either way
    share = sum(evicted.values()) / 5
    assert all(abs(count - share) < 3 * (share * 0.8) ** 0.5 for count in evicted.values())


def test_random_ranks_of_neighbouring_copies_are_independent():
    """Over 2000 steps each of eight copies is the one to leave in about an eighth of them, whatever its position."""
    key = policies.load("eviction", "random").key
    now = {"seed": 3, "pass": 0, "layer": 0}
    leaving = Counter(min(range(8), key=lambda y: key(now | {"pass": p}, (), (), (), y)) for p in range(2000))
    assert all(abs(leaving[y] - 250) < 3 * (250 * 7 / 8) ** 0.5 for y in range(8))


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
    for row, given in zip(rows, weights, strict=True):
        for e, weight in zip(row, given, strict=True):
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


@pytest.mark.parametrize("delta", READINGS)
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


@pytest.mark.parametrize("delta", READINGS)
@few
@given(seed=seeds)
def test_cache_prior_without_lift_is_standard_to_the_last_event(delta: str, seed: int):
    """Logits are full of ties, which the recorded order breaks: recomputing the top-k would break them otherwise."""
    trace = random_trace(seed, ROUTED)
    standard = replayed(trace, 4, routing="standard")
    assert replayed(trace, 4, routing=f"cache_prior:lam=0:delta={delta}") == standard


# -- prefetch, asked directly -----------------------------------------------------------------------------------------

LAYERS, EXPERTS, TOKENS = 4, 7, 3
BARE = Step(*[()] * 10)


class Asked:
    """A policy bound to the tables of a small model, with no engine around it."""

    def __init__(self, kind: str, text: str, layer: int = 0, precisions: int = 1) -> None:
        shape = Shape(geometry_of(Sizes(LAYERS, EXPERTS, 2)), tuple((8 >> p,) * LAYERS for p in range(precisions)))
        self.tables = Tables(shape, (100,), (), seed=0)
        self.tables.now.update(layer=layer, tokens=TOKENS)
        self.bound = Bound(parse(kind, text), self.tables, (100,))

    def suggest(self, look: np.ndarray) -> list[int]:
        """Named experts, given look-ahead scores (D, T, E)."""
        step = BARE._replace(look_score=look.tolist(), look_order=np.argsort(-look, -1, kind="stable").tolist())
        out = [0] * 64
        return out[: self.bound.call_at_gate(self.bound.policy.suggest, step, out)]

    def resolve(self, step: Step, missing: list[int], free: int = 0) -> list[int]:
        """Verdicts on these positions of the demand."""
        verdict = [99] * len(missing)
        self.bound.call_at_gate(self.bound.policy.resolve, step, missing, free, verdict)
        return verdict


def look_scores(seed: int, highest: int = 12) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, highest, (3, TOKENS, EXPERTS))


def of_layers(layer: int, names: list[list[int]]) -> list[int]:
    """Experts of the layers after `layer`, nearest first, nothing beyond the last."""
    ahead = range(layer + 1, min(LAYERS, layer + 1 + len(names)))
    return [target * EXPERTS + e for target, chosen in zip(ahead, names, strict=False) for e in chosen]


@few
@given(seed=seeds, layer=st.integers(0, 3), depth=st.integers(1, 3), factor=st.sampled_from(["0.5", "1", "1.3", "9"]))
def test_top_k_names_the_best_of_every_token(seed: int, layer: int, depth: int, factor: str):
    """k = 2: factors 0.5, 1 and 1.3 give 1, 2 and ceil(2.6) = 3 experts, 9 all seven."""
    look, count = look_scores(seed), {"0.5": 1, "1": 2, "1.3": 3, "9": 7}[factor]
    names = [named(rows, [best(row, count) for row in rows]) for rows in look[:depth].tolist()]
    assert Asked("prefetch", f"top_k:factor={factor}:depth={depth}", layer).suggest(look) == of_layers(layer, names)


def test_top_k_does_not_round_up_for_a_float_that_is_a_hair_too_large():
    """2.2 * 25 is 55.00000000000001 as a float, and still 55 experts."""
    asked, look = Asked("prefetch", "top_k:factor=2.2"), np.arange(60)[None, None, :]
    asked.tables.now.update(k=25, experts=60, tokens=1)
    assert 2.2 * 25 > 55
    assert len(asked.suggest(look)) == 55


@few
@given(seed=seeds, layer=st.integers(0, 3), depth=st.integers(1, 3), percentile=st.integers(0, 100))
def test_score_names_what_exceeds_each_tokens_percentile(seed: int, layer: int, depth: int, percentile: int):
    look = look_scores(seed)
    names = [named(rows, [above_percentile(row, percentile) for row in rows]) for rows in look[:depth].tolist()]
    text = f"score:percentile={percentile}:depth={depth}"
    assert Asked("prefetch", text, layer).suggest(look) == of_layers(layer, names)


@few
@given(seed=seeds, percentile=st.integers(1, 100), highest=st.sampled_from([12, 100, 2**24]))
def test_score_over_a_running_pool_names_what_exceeds_everything_seen(seed: int, percentile: int, highest: int):
    """Three gates in a row: the pool remembers, and counts each token before judging it."""
    asked, history = Asked("prefetch", f"score:percentile={percentile}:pool=running"), list[int]()
    for gate in range(3):
        look = look_scores(seed + gate, highest)
        picks = [above_running(history, row, percentile) for row in look[0].tolist()]
        assert asked.suggest(look) == of_layers(0, [named(look[0].tolist(), picks)])


@few
@given(seed=seeds, layer=st.integers(0, 3), fetch=st.integers(1, 8))
def test_side_buffer_names_the_likeliest_of_the_next_layer(seed: int, layer: int, fetch: int):
    look = look_scores(seed)
    names = named(look[0].tolist(), [best(row, fetch) for row in look[0].tolist()])
    assert Asked("prefetch", f"side_buffer:fetch={fetch}", layer).suggest(look) == of_layers(layer, [names])


# -- misses, asked directly ---------------------------------------------------------------------------------------------

missing_of = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1)))


@few
@given(ranks=st.lists(st.integers(0, 7), min_size=1, max_size=8), keep=st.integers(0, 8))
def test_drop_keeps_the_best_ranked(ranks: list[int], keep: int):
    everything = list(range(len(ranks)))
    verdicts = Asked("miss", f"drop:keep={keep}").resolve(BARE._replace(rank=ranks), everything)
    assert verdicts == [DROP if rank >= keep else 0 for rank in ranks]


@few
@given(missing=missing_of, below=st.lists(st.sampled_from([f"0.{n}" for n in range(1, 10)]), min_size=1, max_size=3))
def test_cascade_by_importance_degrades_the_tail_of_the_demand(missing: tuple[int, set[int]], below: list[str]):
    """Four tiers; the wanted precision before look-up and the fetched one are the same."""
    demanded, positions = missing[0], sorted(missing[1])
    asked = Asked("miss", f"cascade:bits=8/4/2/1:below={'/'.join(below)}", precisions=4)
    step = BARE._replace(expert=list(range(demanded)))
    tiers = [cascade_tier(n, demanded, below) for n in positions]
    assert asked.resolve(step, positions) == tiers
    assert [asked.bound.call_at_gate(asked.bound.policy.want, step, n) for n in positions] == tiers


@few
@given(missing=missing_of, free=st.integers(0, 40))
def test_cascade_under_pressure_takes_what_fits_beside_the_fetches_before(missing: tuple[int, set[int]], free: int):
    """Copies weigh 8, 4 and 2 bytes; the lowest is taken even where nothing fits."""
    demanded, positions = missing[0], sorted(missing[1])
    asked = Asked("miss", "cascade:when=pressure", precisions=3)
    verdicts, left = asked.resolve(BARE._replace(expert=list(range(demanded))), positions, free), free
    for verdict in verdicts:
        assert verdict == next((tier for tier, size in enumerate((8, 4, 2)) if size <= left), 2)
        left -= 8 >> verdict


@few
@given(misses=st.integers(1, 20), tenths=st.integers(0, 10))
def test_split_fetches_the_first_share_and_computes_the_rest(misses: int, tenths: int):
    """Halves round up: 0.5 of 3 misses fetches 2; at least one is always fetched."""
    fetched = max(1, (tenths * misses + 5) // 10)
    verdicts = Asked("miss", f"split:q={tenths / 10}").resolve(BARE, list(range(misses)))
    assert verdicts == [0] * fetched + [CPU] * (misses - fetched)


def test_substitute_asks_every_token():
    assert Asked("miss", "substitute").resolve(BARE, [0, 1]) == [PER_TOKEN] * 2


# -- substitution in a replay -------------------------------------------------------------------------------------------


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
    """A prefill of five tokens and nine decode passes: each token finds a stand-in of its own, or the expert is fetched."""
    trace, slots = random_trace(seed, ROUTED), ROUTED.experts + spare
    outcome: Outcome = replayed(trace, slots, miss=f"substitute:tolerance={sixteenths / 16}")
    model = SubstitutedByModel(trace, slots, sixteenths * UNIT // 16)
    assert outcome.ran == model.ran
    assert [access.hit for access in outcome.accesses] == model.hits
    assert outcome.totals["substituted"] == model.replaced
