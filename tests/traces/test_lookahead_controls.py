"""Look-ahead with the prediction taken out: what a control keeps, and what is left of prefetching under it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from moereplay.traces.routers import weigh
from moereplay.traces.schema import Header, Request, Trace, memory_trace
from moereplay.traces.token_arrays import predicted
from tests.kit.every import every
from tests.kit.policy_runs import (
    RENORMALISED,
    Sizes,
    geometry_of,
    random_trace,
    replayed_by_compiled,
    replayed_by_reference,
)


def test_shuffling_tokens_keeps_every_prediction_and_gives_it_to_another_token():
    """The same other token at every depth and in every layer: a prediction stays whole."""
    trace = random_trace(5, Sizes(layers=3, experts=6, k=2, tokens=50, depth=2))
    other = np.random.Generator(np.random.PCG64(7)).permutation(50)
    assert (other != np.arange(50)).any()
    for depth in (1, 2):
        plain, shuffled = predicted(trace, depth), predicted(trace, depth, "shuffled_tokens", 7)
        np.testing.assert_array_equal(shuffled.score, plain.score[other])
        np.testing.assert_array_equal(shuffled.order, plain.order[other])


def test_shuffling_experts_keeps_each_tokens_scores_and_forgets_whose_they_are():
    trace = random_trace(5, Sizes(layers=3, experts=6, k=2, tokens=400, depth=1))
    plain, shuffled = predicted(trace, 1), predicted(trace, 1, "shuffled_experts", 7)
    np.testing.assert_array_equal(np.sort(plain.score, -1), np.sort(shuffled.score, -1))
    ranked = np.take_along_axis(shuffled.score, shuffled.order.astype(int), -1)
    assert (np.diff(ranked) <= 0).all()
    # the best stays the best for one token in six; 800 draws, three deviations
    assert np.mean(plain.order[:, :2, 0] == shuffled.order[:, :2, 0]) == pytest.approx(1 / 6, abs=0.04)


@pytest.mark.slow
@every(
    "prefetch, control",
    product(["top_k", "score", "side_buffer", "confident:after_miss=false"], ["shuffled_tokens", "shuffled_experts"]),
)
def test_under_a_control_a_policy_names_as_many_experts_and_fewer_right_ones(prefetch: str, control: str):
    """Look-ahead that is the next gate itself: all of a token's best two are right, by chance one in four."""
    trace = foretold(100)
    plain, shuffled, other = (
        replayed_by_compiled(trace, 12, prefetch=prefetch, lookahead=look, seed=seed).totals
        for look, seed in [("recorded", 0), (control, 0), (control, 1)]
    )
    assert shuffled["predicted"] == pytest.approx(plain["predicted"], rel=0.01)
    assert shuffled["predicted_demanded"] < 0.5 * plain["predicted_demanded"]
    assert replayed_by_reference(trace, 12, prefetch=prefetch, lookahead=control).totals == shuffled != other


def foretold(tokens: int) -> Trace:
    """Four layers whose look-ahead is right, all decode."""
    logits = np.random.Generator(np.random.PCG64(9)).standard_normal((tokens, 4, 8)).astype(np.float32)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :2]
    ahead = np.concatenate([logits[:, 1:], np.zeros_like(logits[:, :1])], axis=1)
    request = Request(chosen, 0, weigh(RENORMALISED, logits, chosen), logits, (ahead,))
    return memory_trace(Header(geometry=geometry_of(Sizes(layers=4, experts=8, k=2)), lookahead_depth=1), [request])
