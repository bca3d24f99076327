"""Rank correlation against worked examples and its own laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.analysis.statistics import spearman

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
