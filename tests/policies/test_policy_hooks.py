"""Hooks called one by one, without an engine, against slow models and by hand."""

from __future__ import annotations

from collections import Counter

from moereplay import policies
from moereplay.policies.contract import NEVER, PER_TOKEN
from tests.kit.bound_policies import BARE, PolicyHarness, look_ahead
from tests.kit.every import every
from tests.kit.hook_twins import hook_of
from tests.kit.policy_runs import Sizes

MODEL = Sizes(layers=4, experts=7, k=2)


# -- eviction -----------------------------------------------------------------------------------------------------


def key_at(text: str, now: dict[str, int], **expert: int) -> int:
    """Expert 0 of layer 0, in a model of four layers; it was last used in pass 2, as the third use of all."""
    row = {"layer": 0, "needed": 0, "last_pass": 2, "prediction_pass": -1, "last_use": 3, "next_use": 9} | expert
    harness = PolicyHarness("eviction", text, MODEL)
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
    harness = PolicyHarness("eviction", text, MODEL)
    harness.tables.now["pass"] = 5
    harness.tables.experts[0].update(incoming)
    harness.tables.experts[1].update(leaving)
    return harness.call("admit", 0, prefetched, 1)


@every("text, own, other, taken", [
    ("belady:bypass=true", 8, 7, False),
    ("belady:bypass=true", 7, 8, True),
    ("belady:bypass=true", NEVER, NEVER, True),
    ("belady", NEVER, 7, True),
])  # fmt: skip
def test_belady_bypasses_what_comes_back_strictly_later(text: str, own: int, other: int, taken: bool):
    assert admitted(text, 0, {"next_use": own}, {"next_use": other}) == taken


@every("prefetched", [0, 1])
@every("last_pass", [4, 5])
@every("allowed", ["true", "false"])
def test_least_stale_may_guard_current_experts_from_prefetches(prefetched: int, last_pass: int, allowed: str):
    taken = admitted(f"least_stale:prefetch_evicts_current={allowed}", prefetched, {}, {"last_pass": last_pass})
    assert taken == (allowed == "true" or not prefetched or last_pass == 4)


def test_random_ranks_of_neighbouring_copies_are_independent():
    """Over 2000 steps each of eight copies is evicted in about an eighth of them, whatever its position."""
    key = hook_of(policies.load("eviction", "random"), "key")
    now = {"seed": 3, "pass": 0, "layer": 0}
    leaving = Counter(min(range(8), key=lambda y: key(now | {"pass": p}, (), (), (), y)) for p in range(2000))
    assert all(abs(leaving[y] - 250) < 3 * (250 * 7 / 8) ** 0.5 for y in range(8))


# -- prefetches and misses ------------------------------------------------------------------------------------------


def test_top_k_does_not_round_up_for_a_float_that_is_a_hair_too_large():
    """2.2 * 25 is 55.00000000000001 as a float, and still 55 experts."""
    harness = PolicyHarness("prefetch", "top_k:factor=2.2", Sizes(layers=2, experts=60, k=25))
    assert 2.2 * 25 > 55
    assert len(harness.suggest(look_ahead([n / 60 for n in range(60)]))) == 55


def test_substitute_asks_every_token():
    assert PolicyHarness("miss", "substitute", MODEL).resolve(BARE, [0, 1]) == [PER_TOKEN] * 2


@every("text", ["top_k:factor=1", "side_buffer:fetch=2", "score:pool=running:percentile=50"])
def test_scores_below_zero_are_scores(text):
    """A negative correction bias (DeepSeek-V3) pushes all of them below zero; the best are still suggested."""
    scores = [-0.9, -0.9, -0.9, -0.2, -0.9, -0.1, -0.9]
    suggested = PolicyHarness("prefetch", text, MODEL).suggest(look_ahead(scores))
    assert suggested == ([] if text.startswith("score") else [(1, 5), (1, 3)])  # one bucket: none is above it
