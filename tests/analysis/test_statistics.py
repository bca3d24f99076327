"""Rank correlation, intervals and differences: worked examples, closed forms, and laws that any data obey."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.analysis.statistics import EXACT, FIRST, ONE, TAIL, Pairs, difference, interval, spearman, unearned
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
REQUESTS = st.lists(REQUEST, min_size=6, max_size=EXACT)
COUNTS = (3, 6, EXACT, EXACT + 1)


def drawn(count: int, seed: int = 0) -> Pairs:
    """Unequal requests whose rates differ."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(50, 500, count)
    return list(zip(dice.binomial(lengths, dice.beta(12, 8, count)).tolist(), lengths.tolist(), strict=True))


@every("count", COUNTS)
def test_requests_of_one_rate_leave_no_doubt(count: int) -> None:
    for share in (False, True):
        found = interval([(3 * length, 7 * length) for length in range(1, count + 1)], share=share)
        assert (found.low, found.high) == (pytest.approx(3 / 7, abs=1e-12), pytest.approx(3 / 7, abs=1e-12))


@every("count", COUNTS)
def test_a_configuration_is_no_better_than_itself(count: int) -> None:
    found = difference(drawn(count), drawn(count))
    assert (found.value, found.off, found.p) == (0, 0, 1)


@every("count", COUNTS)
def test_what_every_request_gains_alike_is_as_certain_as_their_number_allows(count: int) -> None:
    """Half of the denominator more, whatever the request: of 2 ** n ways to swap sides, two are as far apart."""
    found = difference([(over + under / 2, under) for over, under in drawn(count)], drawn(count))
    assert found.value == pytest.approx(0.5)
    assert (found.off, found.p) == (0, 2.0 ** (1 - count) if count <= EXACT else 0)


@every("count", COUNTS)
def test_the_other_way_round_only_the_sign_changes(count: int) -> None:
    one, other = difference(drawn(count, 1), drawn(count, 2)), difference(drawn(count, 2), drawn(count, 1))
    assert (one.value, one.off, one.p) == (-other.value, pytest.approx(other.off), pytest.approx(other.p))


@given(REQUESTS, st.integers(0, 1))
def test_an_interval_holds_its_figure_and_that_of_the_inverse_is_its_inverse(requests: Pairs, cold: int) -> None:
    found, inverse = interval(requests, cold), interval([(under, over) for over, under in requests], cold)
    assert found.low is not None and found.high is not None and inverse.low is not None and inverse.high is not None
    assert found.low <= found.value * (1 + 1e-12) and found.value <= found.high * (1 + 1e-12)
    assert inverse.low == pytest.approx(1 / found.high) and inverse.high == pytest.approx(1 / found.low)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(100, 900)), min_size=6, max_size=12), st.integers(0, 1))
def test_misses_have_the_rest_of_the_interval_of_hits(requests: Pairs, cold: int) -> None:
    hits, misses = (interval(side, cold, share=True) for side in (requests, [(b - a, b) for a, b in requests]))
    assert hits.low is not None and hits.high is not None
    assert 0 <= hits.low <= hits.value + 1e-12 and hits.value <= hits.high + 1e-12 <= 1 + 2e-12
    assert (misses.low, misses.high) == (pytest.approx(1 - hits.high), pytest.approx(1 - hits.low))


@given(REQUESTS, st.integers(2, 9))
def test_units_change_nothing(requests: Pairs, factor: int) -> None:
    """Nanoseconds or milliseconds: the interval scales, the chance stays."""
    other = [(over + at % 3, under) for at, (over, under) in enumerate(requests)]
    found = difference(requests, other)
    first, second = ([(over * factor, under) for over, under in side] for side in (requests, other))
    scaled = difference(first, second)
    assert scaled.value == pytest.approx(found.value * factor)
    assert scaled.p == found.p and scaled.off == pytest.approx((found.off or 0) * factor)


def test_of_many_requests_an_interval_without_zero_and_a_small_chance_are_the_same() -> None:
    for seed in range(40):
        found = difference(drawn(EXACT + 1, seed), drawn(EXACT + 1, seed + 100))
        assert found.off is not None and found.p is not None
        assert (abs(found.value) > found.off) == (found.p < 0.05)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=6))
def test_a_chance_is_the_share_of_swaps_that_are_as_far_apart(requests: list[tuple[int, int, int]]) -> None:
    """All swaps of sides, one by one in fractions, of TPOT and of its inverse: they are ordered alike."""
    total = sum(under for *_, under in requests)

    def apart(swaps: Sequence[int], turned: bool) -> Fraction:
        ours, theirs = (
            sum(each[swap ^ side] + 1 for each, swap in zip(requests, swaps, strict=True)) for side in (0, 1)
        )
        return abs(Fraction(total, ours) - Fraction(total, theirs)) if turned else Fraction(abs(ours - theirs), total)

    for turned in (False, True):
        found = [apart(swaps, turned) for swaps in product((0, 1), repeat=len(requests))]
        ours, theirs = ([(each[side] + 1, each[2]) for each in requests] for side in (0, 1))
        if turned:
            ours, theirs = ([(under, over) for over, under in side] for side in (ours, theirs))
        assert difference(ours, theirs).p == sum(each >= found[0] for each in found) / len(found)


def test_eleven_of_twelve_requests_decide_whatever_the_cold_one_is_like() -> None:
    """Eleven gain 40 to 44 points, the first loses 3: only its own sign can turn, so 4 of 4,096 ways are as far apart.

    The others are within 4 points of each other, so their mean is known to 1 or so, and the first counts one twelfth.
    """
    ours = [(67.0, 100)] + [(62.0 + at % 5, 100) for at in range(11)]
    theirs = [(70.0, 100)] + [(22.0, 100)] * 11
    found = difference(ours, theirs, cold=1)
    assert found.p == 4 / 4096 and found.off is not None and found.off < 0.015


def test_a_cold_request_does_not_widen_the_interval() -> None:
    """948 of 979 misses are the first request's: the others have 3 each, give or take 4, so 16 of them 50, give or take
    17: the hit rate of 99.59 % is known to a few hundredths of a point.
    """
    misses = [948, 12, 8, 0, 3, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
    requests = [(15_000 - each, 15_000) for each in misses]
    found = interval(requests, cold=1, share=True)
    assert found.low is not None and found.high is not None
    assert 0.9955 < found.low < found.value < found.high < 0.9962
    alike = interval(requests, share=True)
    assert alike.low is not None and alike.low < 0.98


def test_equal_requests_have_students_interval() -> None:
    """Differences 1, 2 and 3 have s = 1, and t(2) = 4.303; a cold request before them leaves both."""
    equal = 1e9  # so long that 1, 2 and 3 more are as long
    gains = [(equal + 1, equal), (equal + 2, equal), (equal + 3, equal)]
    none = [(equal, equal)] * 4
    found = difference(gains, none[:3])
    assert (found.value * equal, found.p) == (pytest.approx(2), 2 / 8)
    assert found.off is not None and found.off * equal == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    cold = difference([(equal + 8, equal), *gains], none, cold=1)
    assert cold.value * equal == pytest.approx(3.5)
    assert cold.off is not None and cold.off * equal == pytest.approx(4.3027 / 4**0.5, rel=1e-4)


def test_few_long_requests_have_few_degrees_of_freedom() -> None:
    """Nine of 1 and one of 10: variances of 1 and 46.4 are worth 55.4 ** 2 / 2,163 = 1.42 requests, and t has 1.28.

    Its quantile is 7.7, between the tables' 12.7 of one degree and 4.30 of two; equal requests have 2.26 of nine.
    """
    lengths = [10] * 9 + [100]
    for requests, quantile in (
        ([(9 + at % 2, 30) for at in range(10)], 2.26),
        ([(each, 3 * each) for each in lengths], 7.7),
    ):
        varied = [(over * (1 + at % 3 / 1000), under) for at, (over, under) in enumerate(requests)]
        sums = np.sum(varied, axis=0)
        left = np.log([(sums[0] - over) / (sums[1] - under) for over, under in varied])
        error = (9 / 10 * ((left - left.mean()) ** 2).sum()) ** 0.5
        found = interval(varied)
        assert found.high is not None
        assert np.log(found.high / found.value) / error == pytest.approx(quantile, rel=0.02)


def test_a_larger_difference_is_less_probable() -> None:
    """As corrections for many comparisons need small chances."""
    base, noisy = drawn(16), drawn(16, 1)
    gains = [[(over + at * under / 9, under) for over, under in noisy] for at in range(6)]
    chances = [difference(gain, base).p or 0.0 for gain in gains]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.05 and chances[-1] == 2.0**-15


def test_one_request_says_nothing_of_others() -> None:
    assert interval([(3, 4)])[:4] == (0.75, None, None, 1)
    assert difference([(3, 4)], [(1, 4)]) == (0.5, None, None, 1)
    assert interval([(3, 4), (1, 2)], cold=1).low is None
    assert difference([(3, 4), (1, 2)], [(1, 4), (1, 2)], cold=1).off is None


def test_what_one_request_alone_holds_has_no_interval() -> None:
    assert interval([(3, 4)] + [(0, 0)] * 20).low is None
    assert interval([(0, 4)] * 20)[:4] == (0, None, None, 20)
    assert interval([(4, 4)] * 20, share=True)[:4] == (1, None, None, 20)
    assert difference([(3, 4)] + [(0, 4)] * 20, [(0, 4)] * 21).p == 1


def test_sides_of_other_lengths_and_without_denominators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3.* 2 "):
        difference([(1, 1)] * 3, [(1, 1)] * 2)
    for refused in (lambda: difference([(0, 0)] * 3, [(1, 1)] * 3), lambda: interval([(0, 0)]), lambda: interval([])):
        with pytest.raises(ValueError, match="denominators"):
            refused()


EVEN = [(1.0, 1.0), (1.1, 1.0)] * 8


@every(
    "requests, share, why",
    [
        (EVEN, False, ""),
        # twice the least is not a long one; 2.1 times is, if it stands alone; a share is bounded by its accesses
        ([(each, 1) for each in (15, *[10] * 9, 20)], False, ""),
        ([(each, 1) for each in (15, *[10] * 9, 21)], False, TAIL),
        ([(each, 99) for each in (15, *[10] * 9, 21)], True, ""),
        # lengths 2, 4, 8, ...: their logarithms are not skewed, and they vary as 63 ** 2 / 1365 = 2.9 of one length
        ([(3 * 2**at, 2**at) for at in range(10, 17)], False, ""),
        # 1, 4, 16, ...: 1365 ** 2 / 1118481 = 1.7
        ([(3 * 4**at, 4**at) for at in range(10, 17)], False, ONE),
        # of 15 lengths one is 16 times as long: skewness 3.5; over 100 of one length: enough to show the tail
        ([(30, 10)] * 15 + [(480, 160)], False, TAIL),
        ([(30, 10), (90, 30)] * 100, False, ""),
        # others are .05 from their mean; the first is 1.45 from it, or 1.55: 29 and 31 times as far
        ([(2.5, 1.0), *EVEN], False, ""),
        ([(2.6, 1.0), *EVEN], False, FIRST),
    ],
)
def test_an_interval_is_earned(requests: Pairs, share: bool, why: str) -> None:
    assert unearned(requests, 1, share) == why
