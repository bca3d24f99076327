"""Hooks called one by one, without an engine, against slow models and by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies.contract import CPU, DROP, NEVER, PER_TOKEN, Step
from moereplay.policies.grammar import parse
from moereplay.simulator.interface import NO_ORACLE, CopyLayout
from moereplay.simulator.reference.hooks import BoundPolicy
from moereplay.simulator.reference.state import Tables
from tests.kit.hook_twins import hook_of
from tests.kit.policy_models import above_percentile, above_running, best, cascade_tier, named
from tests.kit.policy_runs import Sizes, geometry_of

seeds = st.integers(0, 2**32)
few = settings(max_examples=80, deadline=None, derandomize=True)
LAYERS, EXPERTS, TOKENS = 4, 7, 3
BARE = Step(*[()] * 10)


class PolicyHarness:
    """A policy bound to the tables of a small model, with no engine around it."""

    def __init__(self, kind: str, text: str, layer: int = 0, precisions: int = 1) -> None:
        layout = CopyLayout(
            geometry_of(Sizes(LAYERS, EXPERTS, 2)), tuple((8 >> p,) * LAYERS for p in range(precisions))
        )
        self.tables = Tables(layout, (100,), NO_ORACLE, seed=0)
        self.tables.now.update(layer=layer, tokens=TOKENS)
        self.bound = BoundPolicy(parse(kind, text), self.tables, (100,))

    def suggest(self, look: np.ndarray) -> list[int]:
        """Named experts, given look-ahead scores (D, T, E)."""
        step = BARE._replace(look_score=look.tolist(), look_order=np.argsort(-look, -1, kind="stable").tolist())
        out = [0] * 64
        return out[: self.at_gate("suggest", step, out)]

    def resolve(self, step: Step, missing: list[int], free: int = 0) -> list[int]:
        """Verdicts on these positions of the demand."""
        verdict = [99] * len(missing)
        self.at_gate("resolve", step, missing, free, verdict)
        return verdict

    def at_gate(self, hook: str, *arguments: Any) -> Any:
        """A routing, miss or prefetch hook's result."""
        return self.bound.call(hook, *arguments)

    def call(self, hook: str, *arguments: int) -> Any:
        """An eviction hook's result."""
        return self.bound.call(hook, *arguments)


# -- eviction -----------------------------------------------------------------------------------------------------


def key_at(text: str, now: dict[str, int], **expert: int) -> int:
    """Expert 0 of layer 0, in a model of four layers; it was last used in pass 2, as the third use of all."""
    row = {"layer": 0, "needed": 0, "last_pass": 2, "prediction_pass": -1, "last_use": 3, "next_use": 9} | expert
    harness = PolicyHarness("eviction", text)
    harness.tables.now.update(now)
    harness.tables.experts[0].update(row)
    return harness.call("key", 0)


def test_least_stale_leaves_a_layer_only_after_its_gate():
    """Between the step's start and its gate none is known to be needed: distance 0 of 4; then a whole round, 4."""
    before, after = ({"pass": 5, "layer": 0, "gated": gated} for gated in (0, 1))
    assert key_at("least_stale", before) - key_at("least_stale", after) == 4
    assert key_at("least_stale", before) == key_at("least_stale", after, needed=1)


def test_least_stale_takes_what_a_prefetch_named_for_current():
    now = {"pass": 5, "layer": 1, "gated": 1}
    assert key_at("least_stale", now, prediction_pass=5) == key_at("least_stale", now, last_pass=5)
    assert (
        key_at("least_stale", now, prediction_pass=4)
        == key_at("least_stale", now)
        < key_at("least_stale", now, prediction_pass=5)
    )


def admitted(text: str, prefetched: int, incoming: dict[str, int], leaving: dict[str, int]) -> bool:
    harness = PolicyHarness("eviction", text)
    harness.tables.now["pass"] = 5
    harness.tables.experts[0].update(incoming)
    harness.tables.experts[1].update(leaving)
    return harness.call("admit", 0, prefetched, 1)


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


def test_random_ranks_of_neighbouring_copies_are_independent():
    """Over 2000 steps each of eight copies is evicted in about an eighth of them, whatever its position."""
    key = hook_of(policies.load("eviction", "random"), "key")
    now = {"seed": 3, "pass": 0, "layer": 0}
    leaving = Counter(min(range(8), key=lambda y: key(now | {"pass": p}, (), (), (), y)) for p in range(2000))
    assert all(abs(leaving[y] - 250) < 3 * (250 * 7 / 8) ** 0.5 for y in range(8))


# -- prefetch -----------------------------------------------------------------------------------------------------


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
    assert PolicyHarness("prefetch", f"top_k:factor={factor}:depth={depth}", layer).suggest(look) == of_layers(
        layer, names
    )


def test_top_k_does_not_round_up_for_a_float_that_is_a_hair_too_large():
    """2.2 * 25 is 55.00000000000001 as a float, and still 55 experts."""
    harness, look = PolicyHarness("prefetch", "top_k:factor=2.2"), np.arange(60)[None, None, :]
    harness.tables.now.update(k=25, experts=60, tokens=1)
    assert 2.2 * 25 > 55
    assert len(harness.suggest(look)) == 55


@few
@given(seed=seeds, layer=st.integers(0, 3), depth=st.integers(1, 3), percentile=st.integers(0, 100))
def test_score_names_what_exceeds_each_tokens_percentile(seed: int, layer: int, depth: int, percentile: int):
    look = look_scores(seed)
    names = [named(rows, [above_percentile(row, percentile) for row in rows]) for rows in look[:depth].tolist()]
    text = f"score:percentile={percentile}:depth={depth}"
    assert PolicyHarness("prefetch", text, layer).suggest(look) == of_layers(layer, names)


@few
@given(seed=seeds, percentile=st.integers(1, 100), highest=st.sampled_from([12, 100, 2**24]))
def test_score_over_a_running_pool_names_what_exceeds_everything_seen(seed: int, percentile: int, highest: int):
    """Three gates in a row: the pool remembers, and counts each token before judging it."""
    harness, history = PolicyHarness("prefetch", f"score:percentile={percentile}:pool=running"), list[int]()
    for gate in range(3):
        look = look_scores(seed + gate, highest)
        picks = [above_running(history, row, percentile) for row in look[0].tolist()]
        assert harness.suggest(look) == of_layers(0, [named(look[0].tolist(), picks)])


@few
@given(seed=seeds, layer=st.integers(0, 3), fetch=st.integers(1, 8))
def test_side_buffer_names_the_likeliest_of_the_next_layer(seed: int, layer: int, fetch: int):
    look = look_scores(seed)
    names = named(look[0].tolist(), [best(row, fetch) for row in look[0].tolist()])
    assert PolicyHarness("prefetch", f"side_buffer:fetch={fetch}", layer).suggest(look) == of_layers(layer, [names])


# -- misses -------------------------------------------------------------------------------------------------------

missing_of = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1)))


@few
@given(ranks=st.lists(st.integers(0, 7), min_size=1, max_size=8), keep=st.integers(0, 8))
def test_drop_keeps_the_best_ranked(ranks: list[int], keep: int):
    everything = list(range(len(ranks)))
    verdicts = PolicyHarness("miss", f"drop:keep={keep}").resolve(BARE._replace(rank=ranks), everything)
    assert verdicts == [DROP if rank >= keep else 0 for rank in ranks]


@few
@given(missing=missing_of, below=st.lists(st.sampled_from([f"0.{n}" for n in range(1, 10)]), min_size=1, max_size=3))
def test_cascade_by_importance_degrades_the_tail_of_the_demand(missing: tuple[int, set[int]], below: list[str]):
    """Four tiers; the wanted precision before look-up and the fetched one are the same."""
    demanded, positions = missing[0], sorted(missing[1])
    harness = PolicyHarness("miss", f"cascade:bits=8/4/2/1:below={'/'.join(below)}", precisions=4)
    step = BARE._replace(expert=list(range(demanded)))
    tiers = [cascade_tier(n, demanded, below) for n in positions]
    assert harness.resolve(step, positions) == tiers
    assert [harness.at_gate("want", step, n) for n in positions] == tiers


@few
@given(missing=missing_of, free=st.integers(0, 40))
def test_cascade_under_pressure_takes_what_fits_beside_the_fetches_before(missing: tuple[int, set[int]], free: int):
    """Copies weigh 8, 4 and 2 bytes; the lowest is taken even where nothing fits."""
    demanded, positions = missing[0], sorted(missing[1])
    harness = PolicyHarness("miss", "cascade:when=pressure", precisions=3)
    verdicts, left = harness.resolve(BARE._replace(expert=list(range(demanded))), positions, free), free
    for verdict in verdicts:
        assert verdict == next((tier for tier, size in enumerate((8, 4, 2)) if size <= left), 2)
        left -= 8 >> verdict


@few
@given(misses=st.integers(1, 20), tenths=st.integers(0, 10))
def test_split_fetches_the_first_share_and_computes_the_rest(misses: int, tenths: int):
    """Halves round up: 0.5 of 3 misses fetches 2; at least one is always fetched."""
    fetched = max(1, (tenths * misses + 5) // 10)
    verdicts = PolicyHarness("miss", f"split:q={tenths / 10}").resolve(BARE, list(range(misses)))
    assert verdicts == [0] * fetched + [CPU] * (misses - fetched)


def test_substitute_asks_every_token():
    assert PolicyHarness("miss", "substitute").resolve(BARE, [0, 1]) == [PER_TOKEN] * 2


@pytest.mark.parametrize("text", ["top_k:factor=1", "side_buffer", "score:pool=running:percentile=50"])
def test_scores_below_zero_are_scores(text):
    """A negative correction bias (DeepSeek-V3) pushes all of them below zero; the best are still suggested."""
    look = np.full((1, TOKENS, EXPERTS), -900)
    look[..., 3], look[..., 5] = -200, -100
    named_ = PolicyHarness("prefetch", text).suggest(look)
    assert named_ == ([] if text.startswith("score") else [EXPERTS + 5, EXPERTS + 3])  # one bucket: none is above it
