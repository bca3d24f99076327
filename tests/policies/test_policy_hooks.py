"""Hooks called one by one, without an engine, against slow models and by hand."""

from __future__ import annotations

from tests.kit.bound_policies import PolicyHarness, look_ahead
from tests.kit.every import every
from tests.kit.policy_runs import Sizes

MODEL = Sizes(layers=4, experts=7, k=2)


# -- eviction -----------------------------------------------------------------------------------------------------


def test_least_stale_leaves_a_layer_only_after_its_gate():
    """Between the step's start and its gate none is known to be needed: distance 0 of 4; then a whole round, 4."""

    def key_at(gated: int, needed: int = 0) -> int:
        harness = PolicyHarness("eviction", "least_stale", MODEL)
        harness.tables.now.update({"pass": 5, "layer": 0, "gated": gated})
        harness.tables.experts[0].update(layer=0, needed=needed, last_pass=2, prediction_pass=-1)
        return harness.call("key", 0)

    assert key_at(gated=0) - key_at(gated=1) == 4
    assert key_at(gated=0) == key_at(gated=1, needed=1)


# -- prefetches and misses ------------------------------------------------------------------------------------------


def test_top_k_does_not_round_up_for_a_float_that_is_a_hair_too_large():
    """2.2 * 25 is 55.00000000000001 as a float, and still 55 experts."""
    harness = PolicyHarness("prefetch", "top_k:factor=2.2", Sizes(layers=2, experts=60, k=25))
    assert 2.2 * 25 > 55
    assert len(harness.suggest(look_ahead([n / 60 for n in range(60)]))) == 55


@every("text", ["top_k:factor=1", "side_buffer:fetch=2", "score:pool=running:percentile=50"])
def test_scores_below_zero_are_scores(text):
    """A negative correction bias (DeepSeek-V3) pushes all of them below zero; the best are still suggested."""
    scores = [-0.9, -0.9, -0.9, -0.2, -0.9, -0.1, -0.9]
    suggested = PolicyHarness("prefetch", text, MODEL).suggest(look_ahead(scores))
    assert suggested == ([] if text.startswith("score") else [(1, 5), (1, 3)])  # one bucket: none is above it
