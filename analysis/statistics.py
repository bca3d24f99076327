"""Confidence intervals of ratios of sums over requests, paired differences of two such ratios, and rank correlation.

Intervals are Student's t with the jackknife's standard error (Efron, The Jackknife, the Bootstrap and Other Resampling
Plans, 1982, ch. 3). Requests that meet an empty cache are part of the figure, but the spread is that of the others.
P-values come from the exact sign-flip test (Pitman, Significance Tests Which May Be Applied to Samples from Any
Populations, 1937). studies/pages/coverage.md has the measured coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from typing import NamedTuple

import numpy as np

Pairs = Sequence[tuple[float, float]]  #: numerator and denominator of each request

LEVEL = 0.05  #: probability outside an interval
EXACT = 30  #: most requests whose signs are all tried; Student's t of more
#: Power of a request's size to which its variance grows: 1 by counts, 2 if all of its length shares one rate. Chosen by
#: the coverage study.
GROWTH = 5 / 3
ROUNDING = 1e-12  #: errors below this share of the figure count as zero
#: Sizes that differ by no more than this ratio have no tail; an effective number of `MANY` requests shows a tail well.
ALIKE, MANY = 2.0, 100
FEWEST = 2.0  #: effective number of requests below which one of them is most of the trace
SKEWNESS = 1.0  #: of the logarithms of sizes, at most; a lognormal distribution has 0, a power law 2
OUTLIER = 30.0  #: ratio of a cold request's deviation to the others', above which it decides the figure
ONE = "one request is most of it"
TAIL = "longer requests than these may decide it"
FIRST = "the first request, whose cache is cold, decides it"


class Interval(NamedTuple):
    """A ratio of sums and its 95 % CI; `low` and `high` are None if the requests give none, and `why` is a reason."""

    value: float
    low: float | None
    high: float | None
    requests: int
    why: str = ""


class Difference(NamedTuple):
    """First ratio minus second, half the 95 % CI of that, and its p-value."""

    value: float
    off: float | None
    p: float | None
    requests: int


class _Spread(NamedTuple):
    """Standard error of an estimate, and the degrees of freedom of its t."""

    error: float
    degrees: float

    def half(self) -> float:
        """Return half the width of the 95 % CI."""
        from scipy.special import stdtrit  # imported here: only comparisons pay for it

        return self.error * float(stdtrit(self.degrees, 1 - LEVEL / 2))

    def beyond(self, value: float) -> float:
        """Return the two-sided p-value of an estimate."""
        from scipy.special import stdtr

        return 2 * float(stdtr(self.degrees, -abs(value) / self.error))


def interval(pairs: Pairs, cold: int = 0, share: bool = False) -> Interval:
    """Return a ratio of sums with its 95 % CI; the first `cold` requests met an empty cache.

    The scale is logarithmic, so that the interval of tokens/s is the inverse of that of TPOT; that of a share is the
    logarithm of its odds, so that misses have the rest of the interval of hits. Raises ValueError if the denominators
    sum to zero.
    """
    samples = _array(pairs)
    parts = np.stack([samples[:, 0], samples[:, 1] - samples[:, 0]], axis=1) if share else samples
    value, count = _ratio(samples), len(samples)
    left = (parts.sum(axis=0) - parts)[cold:]
    if len(left) < 2 or (left <= 0).any():
        return Interval(value, None, None, count)
    sizes = samples[:, 1:] if share else samples
    logs = np.log(left[:, 0] / left[:, 1])
    off = _spread(logs, sizes**GROWTH, cold).half()
    if off > 700:  # exp would overflow
        return Interval(value, None, None, count)
    if not share:
        return Interval(value, value * exp(-off), value * exp(off), count)
    low, high = (value / (value + (1 - value) * exp(-end)) for end in (-off, off))
    return Interval(value, low, high, count)


def difference(first: Pairs, second: Pairs, cold: int = 0) -> Difference:
    """Return the difference of two ratios over the same requests, given in the same order.

    The first `cold` requests met an empty cache. Raises ValueError for unequal lengths, or if the denominators of a
    side sum to zero.
    """
    if len(first) != len(second):
        raise ValueError(f"unequal lengths: {len(first)} and {len(second)} samples")
    sides, count = [_array(first), _array(second)], len(first)
    ratios = [_ratio(side) for side in sides]
    value = ratios[0] - ratios[1]
    if count < 2:
        return Difference(value, None, None, count)
    p = _sign_flips(sides) if count <= EXACT else None
    left = [(side.sum(axis=0) - side)[cold:] for side in sides]
    if count - cold < 2 or any((each[:, 1] <= 0).any() for each in left):
        return Difference(value, None, p, count)
    apart = left[0][:, 0] / left[0][:, 1] - left[1][:, 0] / left[1][:, 1]
    spread = _spread(apart, np.abs(np.hstack(sides)), cold)  # both have a request's own rate: counts vary
    if spread.error <= ROUNDING * max(map(abs, ratios)):
        return Difference(value, 0.0, float(not value) if p is None else p, count)
    return Difference(value, spread.half(), spread.beyond(value) if p is None else p, count)


def one_dominates(pairs: Pairs, cold: int = 0, share: bool = False) -> bool:
    """Return whether one of the requests after `cold` ones is most of the trace, so that no spread can be seen."""
    return any(_effective(sizes) < FEWEST for sizes in _sizes(pairs, cold, share) if sizes.any())


def unearned(pairs: Pairs, cold: int = 0, share: bool = False) -> str:
    """Return why the figure of two or more requests after `cold` ones earns no interval; empty if it does.

    Where lengths have a long tail, a few requests mostly lack the long ones, which matter most.
    """
    if one_dominates(pairs, cold, share):
        return ONE
    samples = _array(pairs)
    warm = samples[cold:]
    for sizes in _sizes(pairs, cold, share):
        logs = np.log1p(sizes)
        if sizes.max() > ALIKE * sizes.min() and _effective(sizes) < MANY and _skewness(logs) > SKEWNESS:
            return TAIL
    apart = np.abs(samples[:, 0] - _ratio(warm) * samples[:, 1])
    usual = sqrt(float((apart[cold:] ** 2).mean()))
    return FIRST if apart[:cold].max(initial=0) > OUTLIER * usual else ""


def _sizes(pairs: Pairs, cold: int, share: bool) -> np.ndarray:
    """Return the numerators and denominators of requests after `cold` ones; of a share the denominators alone."""
    sizes = _array(pairs)[cold:].T
    return sizes[1:] if share else sizes


def _skewness(values: np.ndarray) -> float:
    return float((((values - values.mean()) / values.std()) ** 3).mean())


def _effective(sizes: np.ndarray) -> float:
    """Return the effective number of requests (Kish): their sum varies as that of so many of one size."""
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def _array(pairs: Pairs) -> np.ndarray:
    return np.asarray(pairs, np.float64).reshape(-1, 2)


def _ratio(side: np.ndarray) -> float:
    over, under = side.sum(axis=0)
    if under <= 0:
        raise ValueError("denominators sum to zero: the ratio is undefined")
    return float(over / under)


def _spread(left: np.ndarray, variances: np.ndarray, cold: int) -> _Spread:
    """Return the jackknife's error, from estimates that each leave out one of the requests after the cold ones.

    A cold request's excess over the others is the same in other traces; the rest of it varies as they do. `variances`
    of requests, up to a factor, in columns, give the degrees of freedom: n equal ones have n - 1, few large ones fewer
    (Satterthwaite, An Approximate Distribution of Estimates of Variance Components, 1946).
    """
    free, count = len(left) - 1, len(left) + cold
    known = [column for column in variances[cold:].T if column.any()]
    even = min(map(_effective, known), default=1.0)
    squares = float(((left - left.mean()) ** 2).sum())
    return _Spread((count - 1) * sqrt(squares / (free * count)), max(1.0, even * free / len(left)))


def _sign_flips(sides: Sequence[np.ndarray]) -> float:
    """Return the share of all ways to swap the sides of requests whose difference is at least as large.

    Swapping a request changes the sign of its gain over the ratio of both sides together, so differences are ordered
    as sums of signed gains. Sums of either half of the requests are enough to count the sums of all.
    """
    less, ratio = sides[0] - sides[1], _ratio(sides[0] + sides[1])
    gains = less[:, 0] - ratio * less[:, 1]
    sums = [np.zeros(1), np.zeros(1)]
    for at, gain in enumerate(gains):
        sums[at % 2] = np.concatenate([sums[at % 2] + gain, sums[at % 2] - gain])
    reach = abs(gains.sum()) - ROUNDING * np.abs(gains).sum()
    above = len(sums[1]) - np.searchsorted(np.sort(sums[1]), reach - sums[0])
    return min(1.0, 2 * float(above.sum()) / 2.0 ** len(gains))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None if either side is constant. Raises ValueError for unequal lengths.

    Tied values share the mean of their ranks (Kendall, Rank Correlation Methods, ch. 3).
    """
    if len(first) != len(second):
        raise ValueError(f"unequal lengths: {len(first)} and {len(second)}")
    ours, theirs = (_ranks(values) - (len(values) + 1) / 2 for values in (first, second))
    spread = float((ours @ ours) * (theirs @ theirs)) ** 0.5
    return float(ours @ theirs) / spread if spread else None


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, many = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(many) - (many - 1) / 2)[place]
