"""Routers: worked examples per family, properties, and a slow plain-Python model of each family."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moereplay.traces.routers import choice_scores, choose, scores, weigh
from moereplay.traces.schema import Router, TraceError

LN2 = math.log(2)
#: softmax of these is 4, 2, 1, 1 eighths
LOGITS = np.array([[2 * LN2, LN2, 0.0, 0.0]], np.float32)

ROUTERS = {
    "olmoe": Router(),
    "mixtral": Router(renormalise=True),
    "gpt-oss": Router(family="topk_softmax"),
    "phi": Router(family="sparsemixer", jitter=0.01),
    "deepseek-v2": Router(family="softmax_groups", groups=4, groups_kept=2, scale=16.0),
    "deepseek-v3": Router(family="sigmoid_groups", groups=4, groups_kept=2, renormalise=True, scale=2.5),
    "nemotron": Router(family="sigmoid_groups", renormalise=True, scale=2.5),
}
EXPERTS, K = 8, 3
GRID = st.integers(-40, 40).map(lambda eighths: eighths / 8)  # coarse, so that ties are common
ROWS = arrays.arrays(np.float32, (3, EXPERTS), elements=GRID)
ANY = st.sampled_from(sorted(ROUTERS))


def test_equal_scores_go_to_the_lowest_id() -> None:
    assert choose(np.array([[1.0, 3.0, 3.0, 2.0, 3.0]]), 4).tolist() == [[1, 2, 4, 3]]


def test_softmax_top_k_without_renormalisation_keeps_the_share_of_all_experts() -> None:
    # 4/8 and 2/8 of the whole
    assert weigh(Router(), LOGITS, np.array([[0, 1]]))[0] == pytest.approx([0.5, 0.25])


def test_softmax_top_k_with_renormalisation_sums_to_the_scale() -> None:
    # 4 and 2 of 6, times 3
    router = Router(renormalise=True, scale=3.0)
    assert weigh(router, LOGITS, np.array([[0, 1]]))[0] == pytest.approx([2.0, 1.0])


def test_top_k_then_softmax_sees_only_the_chosen() -> None:
    # experts 1 and 3 alone: e^ln2 = 2 against 1
    assert weigh(ROUTERS["gpt-oss"], LOGITS, np.array([[1, 3]]))[0] == pytest.approx([2 / 3, 1 / 3])


def test_sparsemixer_weighs_each_pick_among_its_near_rivals() -> None:
    # Pick 10.0: 9.9 is 1 % away (inside 2 %), 9.0 is 10 % away: weight 1 / (1 + e^-0.1).
    # Pick 9.9 with 10.0 gone: 9.0 is 9 % away, so it is alone and weighs 1.
    logits = np.array([[9.0, 10.0, 9.9, -50.0]], np.float32)
    near = 1 / (1 + math.exp(-0.1))
    assert weigh(ROUTERS["phi"], logits, np.array([[1, 2]]))[0] == pytest.approx([near, 1.0], abs=1e-6)


def test_sparsemixer_gives_a_replaced_pick_its_share_of_the_better_ones() -> None:
    # 9.0 put first by a policy: 10.0 and 9.9 are above it, so it gets 1 / (1 + e^1 + e^0.9)
    logits = np.array([[9.0, 10.0, 9.9, -50.0]], np.float32)
    first = weigh(ROUTERS["phi"], logits, np.array([[0, 1]]))[0, 0]
    assert first == pytest.approx(1 / (1 + math.e + math.exp(0.9)), abs=1e-6)


def test_sparsemixer_survives_a_row_of_zeros() -> None:
    # all equal: the first pick shares with 4, the second with the 3 left
    weights = weigh(ROUTERS["phi"], np.zeros((1, 4), np.float32), np.array([[0, 1]]))
    assert weights[0] == pytest.approx([1 / 4, 1 / 3])


def test_deepseek_v2_keeps_the_groups_with_the_best_expert() -> None:
    # groups (9 0) (5 4) (8 0) (6 6): the best experts are 9, 5, 8, 6, so groups 0 and 2 stay
    logits = np.array([[9, 0, 5, 4, 8, 0, 6, 6]], np.float32)
    assert choose(choice_scores(ROUTERS["deepseek-v2"], logits), 3).tolist() == [[0, 4, 1]]


def test_deepseek_v3_keeps_the_groups_with_the_best_pair() -> None:
    # sums of sigmoids: 1.5, 1.5, 1.5, just under 2: group 3 first, then group 0 by lowest id
    logits = np.array([[50, 0, 50, 0, 50, 0, 6, 6]], np.float32)
    assert choose(choice_scores(ROUTERS["deepseek-v3"], logits), 3).tolist() == [[0, 6, 7]]


def test_the_correction_bias_moves_the_choice_but_not_the_weight() -> None:
    # sigmoid(0) = 1/2 for all; the bias lifts experts 5 and 6
    router, logits = ROUTERS["nemotron"], np.zeros((1, 8), np.float32)
    ids = choose(choice_scores(router, logits, np.eye(8)[5] * 0.2 + np.eye(8)[6] * 0.1), 2)
    assert ids.tolist() == [[5, 6]]
    assert weigh(router, logits, ids)[0] == pytest.approx([1.25, 1.25])


def test_a_bias_on_softmax_is_added_to_the_probabilities() -> None:
    # Ernie 4.5: probabilities 4, 2, 1, 1 eighths; 2 eighths more lift expert 3 above 1; weights stay 4 and 1 of 5
    router, bias = ROUTERS["mixtral"], np.array([0, 0, 0, 0.25], np.float32)
    assert choice_scores(router, LOGITS, bias)[0] == pytest.approx([0.5, 0.25, 0.125, 0.375])
    assert scores(router, LOGITS, bias)[0] == pytest.approx([0.5, 0.25, 0.125, 0.375])
    ids = choose(choice_scores(router, LOGITS, bias), 2)
    assert ids.tolist() == [[0, 3]]
    assert weigh(router, LOGITS, ids)[0] == pytest.approx([0.8, 0.2])


def test_deepseek_v2_scales_and_never_renormalises() -> None:
    router = ROUTERS["deepseek-v2"].model_copy(update={"renormalise": True})
    # 1/2 and 1/4 times 16
    assert weigh(router, LOGITS, np.array([[0, 1]]))[0] == pytest.approx([8.0, 4.0])


def test_groups_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(TraceError, match="4 groups for 6 experts"):
        choice_scores(ROUTERS["deepseek-v3"], np.zeros((1, 6), np.float32))


def test_scores_are_sigmoids_plus_bias_or_softmax_over_all() -> None:
    assert scores(ROUTERS["gpt-oss"], LOGITS)[0] == pytest.approx([0.5, 0.25, 0.125, 0.125])
    biased = scores(ROUTERS["nemotron"], np.array([[0.0, LN2]]), np.array([0.5, -0.5]))
    assert biased[0] == pytest.approx([1.0, 2 / 3 - 0.5])


def test_extreme_logits_give_finite_weights() -> None:
    logits = np.array([[-3e38, 3e38, 0, 1, 2, 3, 4, 5]], np.float32)[:, ::-1] / 4
    for router in ROUTERS.values():
        assert np.isfinite(weigh(router, logits, choose(choice_scores(router, logits), K))).all()


def test_an_absent_id_weighs_nothing() -> None:
    for name in sorted(ROUTERS):
        weights = weigh(ROUTERS[name], LOGITS, np.array([[-1, 0, -1]]))
        assert weights[0, [0, 2]].tolist() == [0, 0]
        assert weights[0, 1] == pytest.approx(weigh(ROUTERS[name], LOGITS, np.array([[0]]))[0, 0])


@given(name=ANY, logits=ROWS)
def test_choice_and_weights_equal_the_plain_model(name: str, logits: np.ndarray) -> None:
    router = ROUTERS[name]
    ids = choose(choice_scores(router, logits), K)
    plain = [slow_choice(router, row.tolist(), K) for row in logits]
    assert ids.tolist() == plain
    expected = [slow_weights(router, row.tolist(), list(chosen)) for row, chosen in zip(logits, plain, strict=True)]
    np.testing.assert_allclose(weigh(router, logits, ids), expected, rtol=2e-6, atol=1e-9)


@given(name=ANY, logits=ROWS, order=st.permutations(range(-1, EXPERTS)))
def test_weights_of_any_ids_equal_the_plain_model(name: str, logits: np.ndarray, order: list[int]) -> None:
    expected = [slow_weights(ROUTERS[name], row.tolist(), order[:K]) for row in logits]
    ids = np.array([order[:K]] * len(logits))
    np.testing.assert_allclose(weigh(ROUTERS[name], logits, ids), expected, rtol=2e-6, atol=1e-9)


@given(logits=ROWS, name=st.sampled_from(["mixtral", "gpt-oss", "deepseek-v3", "nemotron"]))
def test_renormalised_weights_sum_to_the_scale(logits: np.ndarray, name: str) -> None:
    router = ROUTERS[name]
    total = weigh(router, logits, choose(choice_scores(router, logits), K)).sum(-1)
    np.testing.assert_allclose(total, router.scale, rtol=1e-5)


@given(logits=ROWS, name=st.sampled_from(["deepseek-v2", "deepseek-v3"]))
def test_the_choice_stays_inside_the_kept_groups(logits: np.ndarray, name: str) -> None:
    ids = choose(choice_scores(ROUTERS[name], logits), 4)
    assert all(len(set(row // 2)) <= 2 for row in ids)


@given(logits=ROWS, name=st.sampled_from(sorted(set(ROUTERS) - {"phi"})))
def test_weights_fall_with_rank(logits: np.ndarray, name: str) -> None:
    weights = weigh(ROUTERS[name], logits, choose(choice_scores(ROUTERS[name], logits), K))
    assert (np.diff(weights, axis=-1) <= 1e-7).all()


@given(row=st.lists(st.integers(-50, 50), min_size=EXPERTS, max_size=EXPERTS, unique=True), seed=st.integers(0, 99))
def test_relabelling_experts_relabels_the_choice(row: list[int], seed: int) -> None:
    order = np.random.Generator(np.random.PCG64(seed)).permutation(EXPERTS)
    logits = np.array(row, np.float32)
    assert order[choose(logits[order], K)].tolist() == choose(logits, K).tolist()


@settings(max_examples=20)
@given(name=ANY, logits=arrays.arrays(np.float32, (2, 3, EXPERTS), elements=GRID))
def test_leading_axes_are_free(name: str, logits: np.ndarray) -> None:
    router = ROUTERS[name]
    ids = choose(choice_scores(router, logits), K)
    flat = logits.reshape(-1, EXPERTS)
    assert ids.reshape(-1, K).tolist() == choose(choice_scores(router, flat), K).tolist()
    assert weigh(router, logits, ids).ravel().tolist() == weigh(router, flat, ids.reshape(-1, K)).ravel().tolist()


# The plain models: one token, Python floats, written from the papers' formulas.


def slow_choice(router: Router, row: list[float], k: int) -> list[int]:
    """Ids by descending choice score, lowest id first, within the kept groups."""
    sigmoid = router.family == "sigmoid_groups"
    points = [1 / (1 + math.exp(-z)) for z in row] if sigmoid else row
    points = [float(np.float32(point)) for point in points]
    size = len(row) // router.groups
    groups = [range(first, first + size) for first in range(0, len(row), size)]
    best = 2 if sigmoid else 1
    strength = [sum(np.float32(p) for p in sorted(points[e] for e in group)[-best:]) for group in groups]
    order = sorted(range(router.groups), key=lambda g: (-strength[g], g))
    allowed = {e for g in order[: router.groups_kept] for e in groups[g]}
    ranked = sorted(range(len(row)), key=lambda e: (e not in allowed, -points[e] if e in allowed else 0, e))
    return ranked[:k]


def slow_weights(router: Router, row: list[float], ids: list[int]) -> list[float]:
    """Weights of the ids by the family's formula, each in its own branch."""
    chosen = [e for e in ids if e >= 0]
    if router.family == "sparsemixer":
        return slow_sparsemixer(router, row, ids)
    if router.family == "topk_softmax":
        parts = {e: math.exp(row[e]) / sum(math.exp(row[other]) for other in chosen) for e in chosen}
    elif router.family == "sigmoid_groups":
        parts = {e: 1 / (1 + math.exp(-row[e])) for e in chosen}
    else:
        parts = {e: math.exp(row[e]) / sum(math.exp(z) for z in row) for e in chosen}
    whole = sum(parts.values()) if router.renormalise else 1
    return [router.scale * parts[e] / whole if e >= 0 else 0.0 for e in ids]


def slow_sparsemixer(router: Router, row: list[float], ids: list[int]) -> list[float]:
    """Picks in order; each shares with the experts left whose relative distance is at most twice the jitter."""
    weights, gone = [], set()
    for pick in ids:
        if pick < 0:
            weights.append(0.0)
            continue
        top = np.float32(row[pick])
        rivals = [z for e, z in enumerate(row) if e not in gone and slow_gap(top, np.float32(z)) <= np.float32(0.02)]
        weights.append(math.exp(top) / sum(math.exp(z) for z in rivals))
        gone.add(pick)
    return weights


def slow_gap(top: np.float32, z: np.float32) -> np.float32:
    """Distance below `top`, relative to the larger magnitude; 0 where both are 0."""
    size = max(abs(z), top)
    return (top - z) / size if size else np.float32(0)
