"""Rank correlation, intervals and differences: worked examples, closed forms, and laws that any data obey."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.analysis.statistics import FEW, MANY, Pairs, beyond, difference, interval, spearman, student
from tests.kit.every import every

PERMUTATIONS = st.integers(2, 12).flatmap(lambda n: st.permutations(list(range(n))))


def test_a_textbook_example() -> None:
    """Hours of television against IQ of ten people: squared rank differences sum to 194, so 1 - 6 x 194 / 990."""
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(iq, hours) == pytest.approx(1 - 6 * 194 / 990)


def test_ties_are_weighed_by_their_mean_ranks() -> None:
    """By hand: mean ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4 have covariance 4.5 and variances 4.5 and 5."""
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


@given(PERMUTATIONS)
def test_without_ties_it_is_the_formula_of_squared_differences(order: list[int]) -> None:
    n = len(order)
    squares = sum((place - value) ** 2 for place, value in enumerate(order))
    assert spearman(range(n), order) == pytest.approx(1 - 6 * squares / (n * (n * n - 1)))


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=12))
def test_only_order_counts(pairs: list[tuple[int, int]]) -> None:
    """A rising map of one side changes nothing, a falling one the sign; sides may be swapped."""
    first, second = zip(*pairs, strict=True)
    found = spearman(first, second)
    assert spearman([value**3 for value in first], second) == found
    assert spearman(second, first) == found
    if found is not None:
        assert spearman([-value for value in first], second) == pytest.approx(-found)


def test_a_constant_has_none() -> None:
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_sides_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2.*3"):
        spearman([1, 2], [1, 2, 3])


# Intervals and differences

REQUEST = st.tuples(st.integers(1, 400), st.integers(200, 800))
REQUESTS = st.lists(REQUEST, min_size=FEW, max_size=24)
COUNTS = (3, FEW, 30, MANY + 1)


def drawn(count: int, seed: int = 0) -> Pairs:
    """Unequal requests whose rates differ."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(50, 500, count)
    return list(zip(dice.binomial(lengths, dice.beta(12, 8, count)).tolist(), lengths.tolist(), strict=True))


@every("count", COUNTS)
def test_requests_of_one_rate_leave_no_doubt(count: int) -> None:
    found = interval([(3 * length, 7 * length) for length in range(1, count + 1)])
    assert (found.low, found.high) == (pytest.approx(3 / 7, abs=1e-12), pytest.approx(3 / 7, abs=1e-12))


@every("count", COUNTS)
def test_a_configuration_is_no_better_than_itself(count: int) -> None:
    found = difference(drawn(count), drawn(count))
    assert (found.value, found.off, found.p) == (0, 0, 1)


@every("count", COUNTS)
def test_what_every_request_gains_alike_is_certain(count: int) -> None:
    """Half of the denominator more, whatever the request: the ratio rises by one half exactly."""
    found = difference([(over + under / 2, under) for over, under in drawn(count)], drawn(count))
    assert found.value == pytest.approx(0.5)
    assert (found.off, found.p) == (0, 0)


@every("count", COUNTS)
def test_the_other_way_round_only_the_sign_changes(count: int) -> None:
    one, other = difference(drawn(count, 1), drawn(count, 2)), difference(drawn(count, 2), drawn(count, 1))
    assert (one.value, one.off, one.p) == (-other.value, pytest.approx(other.off), pytest.approx(other.p))


@given(REQUESTS)
def test_an_interval_holds_its_figure_and_that_of_the_inverse_is_its_inverse(requests: Pairs) -> None:
    found, inverse = interval(requests), interval([(under, over) for over, under in requests])
    if found.low is None or found.high is None or inverse.low is None or inverse.high is None:
        assert (found.low, inverse.low) == (None, None)
        return
    assert found.low <= found.value * (1 + 1e-12) and found.value <= found.high * (1 + 1e-12)
    assert inverse.low == pytest.approx(1 / found.high) and inverse.high == pytest.approx(1 / found.low)


@given(REQUESTS, st.integers(2, 9))
def test_units_change_nothing(requests: Pairs, factor: int) -> None:
    """Nanoseconds or milliseconds: the interval scales, the chance stays."""
    other = [(over + at % 3, under) for at, (over, under) in enumerate(requests)]
    found = difference(requests, other)
    first, second = ([(over * factor, under) for over, under in side] for side in (requests, other))
    scaled = difference(first, second)
    assert scaled.value == pytest.approx(found.value * factor)
    assert scaled.p == pytest.approx(found.p, abs=2e-3)


@given(REQUESTS)
def test_an_interval_without_zero_and_a_small_chance_are_the_same(requests: Pairs) -> None:
    """Up to where the interval ends in the resamples."""
    found = difference(requests, [(2 * over / 3 + at, under) for at, (over, under) in enumerate(requests)])
    if found.off is not None and found.p is not None and abs(abs(found.value) / max(found.off, 1e-300) - 1) > 1e-9:
        assert (abs(found.value) > found.off) == (found.p < 0.05)


@given(REQUESTS, st.integers(0, 1 << 30))
def test_a_seed_gives_the_same_numbers(requests: Pairs, seed: int) -> None:
    assert interval(requests, seed, 50) == interval(requests, seed, 50)


def test_another_seed_gives_other_resamples() -> None:
    low = {interval(drawn(30), seed).low for seed in range(3)}
    assert len(low) == 3
    assert max(each or 0 for each in low) - min(each or 0 for each in low) < 0.01


def test_a_larger_difference_is_less_probable_also_beyond_all_resamples() -> None:
    """As corrections for many comparisons need chances below one over the number of resamples."""
    base, noisy = drawn(16), drawn(16, 1)
    gains = [[(over + at * under, under) for over, under in noisy] for at in range(1, 6)]
    chances = [difference(gain, base).p or 0.0 for gain in gains]
    assert chances == sorted(chances, reverse=True)
    assert 0 < chances[-1] < 1e-4


def test_few_requests_have_students_interval() -> None:
    """With equal denominators the jackknife is the paired t-test: differences 1, 2 and 3, s = 1, t(2) = 4.303."""
    found = difference([(3, 1), (5, 1), (7, 1)], [(2, 1), (3, 1), (4, 1)])
    assert (found.value, found.off) == (2, pytest.approx(4.3027 / 3**0.5, rel=1e-4))
    assert found.p == pytest.approx(beyond(2 * 3**0.5, 2))


def test_one_request_says_nothing_of_others() -> None:
    assert interval([(3, 4)]) == (0.75, None, None, 1)
    assert difference([(3, 4)], [(1, 4)]) == (0.5, None, None, 1)


def test_what_one_request_alone_holds_has_no_interval() -> None:
    assert interval([(3, 4)] + [(0, 0)] * 20).low is None
    assert interval([(0, 4)] * 20) == (0, None, None, 20)
    alone = difference([(3, 4)] + [(0, 4)] * 20, [(0, 4)] * 21)
    assert alone.off is None and alone.p is not None and alone.p >= 0.05


def test_sides_of_other_lengths_and_without_denominators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3.* 2 "):
        difference([(1, 1)] * 3, [(1, 1)] * 2)
    for refused in (lambda: difference([(0, 0)] * 3, [(1, 1)] * 3), lambda: interval([(0, 0)]), lambda: interval([])):
        with pytest.raises(ValueError, match="denominators"):
            refused()


@every("degrees, ends", [(1, 12.706), (2, 4.303), (9, 2.262), (29, 2.045), (200, 1.972), (5000, 1.960)])
def test_students_t_is_that_of_tables(degrees: int, ends: float) -> None:
    assert student(degrees) == pytest.approx(ends, abs=6e-4)


@given(st.integers(1, 400), st.floats(0, 30))
def test_chances_fall_from_one(degrees: int, off: float) -> None:
    assert beyond(0, degrees) == 1
    assert 0 <= beyond(off + 0.1, degrees) <= beyond(off, degrees) + 1e-12 <= 1 + 1e-12
