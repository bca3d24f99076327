"""Confidence intervals of ratios of sums over requests, differences of two such ratios, and rank correlation.

From ten to five hundred requests: the bootstrap over requests, studentised and symmetric (Hall, The Bootstrap and
Edgeworth Expansion, 1992, ch. 3.6), with the jackknife's standard error. Fewer requests are too few to resample, and
with more the bootstrap gains nothing: Student's t of the jackknife. docs/statistics.md has the measured coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import atan, cos, erfc, exp, isfinite, pi, sin, sqrt
from typing import NamedTuple

import numpy as np

Pairs = Sequence[tuple[float, float]]  #: numerator and denominator of each request

LEVEL = 0.05  #: probability outside an interval
RESAMPLES = 2000
FEW, MANY = 10, 500  #: smallest and largest number of requests for the bootstrap
ROUNDING = 1e-12  #: standard errors below this share of the figure count as zero


class Interval(NamedTuple):
    """A ratio of sums and its 95 % CI; `low` and `high` are None for fewer than two requests."""

    value: float
    low: float | None
    high: float | None
    requests: int


class Difference(NamedTuple):
    """First ratio minus second, half the 95 % CI of that, and its p-value."""

    value: float
    off: float | None
    p: float | None
    requests: int


def interval(pairs: Pairs, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Return a ratio of sums with its 95 % CI, computed on a logarithmic scale.

    On that scale the interval of tokens/s is the inverse of that of TPOT. Raises ValueError if the denominators sum to
    zero.
    """
    samples = _array(pairs)
    over, under = samples.sum(axis=0)
    if under <= 0:
        raise ValueError("denominators sum to zero: the ratio is undefined")
    value, count = float(over / under), len(samples)
    scale = _Scale((samples,), logs=True) if over > 0 else None
    error = scale.jackknife() if scale else None
    if scale is None or error is None:
        return Interval(value, None, None, count)
    off = error * _reach(_drawn(scale, seed, resamples), count) if error > ROUNDING else 0.0
    if not isfinite(off) or off > 700:  # exp would overflow
        return Interval(value, None, None, count)
    return Interval(value, value * exp(-off), value * exp(off), count)


def difference(first: Pairs, second: Pairs, seed: int = 0, resamples: int = RESAMPLES) -> Difference:
    """Return the difference of two ratios over the same requests, given in the same order.

    Raises ValueError for unequal lengths, or if the denominators of a side sum to zero.
    """
    if len(first) != len(second):
        raise ValueError(f"unequal lengths: {len(first)} and {len(second)} samples")
    both = _array(first), _array(second)
    if any(side[:, 1].sum() <= 0 for side in both):
        raise ValueError("denominators sum to zero: the ratio is undefined")
    scale, count = _Scale(both), len(first)
    value, error = scale.value(), scale.jackknife()
    if error is None:
        return Difference(value, None, None, count)
    if error <= ROUNDING * scale.size():
        same = abs(value) <= ROUNDING * scale.size()
        return Difference(value, 0.0, 1.0 if same else 0.0, count)
    drawn = _drawn(scale, seed, resamples)
    off = error * _reach(drawn, count)
    return Difference(value, off if isfinite(off) else None, _chance(abs(value) / error, drawn, count), count)


class _Scale(NamedTuple):
    """The estimated quantity: one ratio or the difference of two, plain or on a logarithmic scale."""

    sides: tuple[np.ndarray, ...]  #: (n, 2) each
    logs: bool = False

    def size(self) -> float:
        """Return the largest ratio, for comparison with rounding errors."""
        return max(abs(float(side[:, 0].sum() / side[:, 1].sum())) for side in self.sides)

    def value(self) -> float:
        """Return the estimate from all requests."""
        ones = np.ones((1, len(self.sides[0])))
        return float(self.of(ones)[0])

    def of(self, weights: np.ndarray) -> np.ndarray:
        """Return the (b,) estimates for weights (b, n) of the requests."""
        return self._less([self._scaled(self._ratios(side, weights)) for side in self.sides])

    def errors(self, weights: np.ndarray) -> np.ndarray:
        """Return the (b,) standard errors, from the influence of each request on the ratio."""
        count = weights.shape[1]
        influence = self._less([self._influence(side, weights) for side in self.sides])
        return np.sqrt((weights * influence**2).sum(axis=1) / (count * (count - 1)))

    def jackknife(self) -> float | None:
        """Return the leave-one-out standard error; None if a single request holds a whole sum.

        Efron, The Jackknife, the Bootstrap and Other Resampling Plans, 1982, ch. 3.
        """
        left = [side.sum(axis=0) - side for side in self.sides]
        count = len(left[0])
        if count < 2 or any((each[:, 1] <= 0).any() for each in left):
            return None
        if self.logs and any((each[:, 0] <= 0).any() for each in left):
            return None
        apart = self._less([self._scaled(each[:, 0] / each[:, 1]) for each in left])
        return sqrt(float(((apart - apart.mean()) ** 2).sum()) * (count - 1) / count)

    def _scaled(self, ratios: np.ndarray) -> np.ndarray:
        return np.log(ratios) if self.logs else ratios

    def _influence(self, side: np.ndarray, weights: np.ndarray) -> np.ndarray:
        ratios = self._ratios(side, weights)[:, None]
        means = (weights @ side[:, 1])[:, None] / weights.shape[1]
        each = (side[:, 0] - ratios * side[:, 1]) / means
        return each / ratios if self.logs else each

    @staticmethod
    def _ratios(side: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (weights @ side[:, 0]) / (weights @ side[:, 1])

    @staticmethod
    def _less(each: list[np.ndarray]) -> np.ndarray:
        return each[0] - each[1] if len(each) == 2 else each[0]


def _array(pairs: Pairs) -> np.ndarray:
    return np.asarray(pairs, np.float64).reshape(-1, 2)


def _drawn(scale: _Scale, seed: int, resamples: int) -> np.ndarray | None:
    """Return the sorted studentised deviations of the resamples; None where Student's t is used instead.

    A resample without a standard error has an infinite deviation.
    """
    count = len(scale.sides[0])
    if not FEW <= count <= MANY:
        return None
    weights = _weights(count, seed, resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(scale.of(weights) - scale.value()) / scale.errors(weights)
    return np.sort(np.nan_to_num(off, nan=np.inf, posinf=np.inf))


@lru_cache(maxsize=4)
def _weights(count: int, seed: int, resamples: int) -> np.ndarray:
    """Return (resamples, count) multiplicities of requests, shared by all figures and configurations."""
    dice = np.random.default_rng([seed, count])
    return dice.multinomial(count, [1 / count] * count, size=resamples).astype(np.float64)


def _reach(drawn: np.ndarray | None, count: int) -> float:
    """Return half the width of an interval in standard errors."""
    return student(count - 1) if drawn is None else float(drawn[-_tail(drawn)])


def _chance(off: float, drawn: np.ndarray | None, count: int) -> float:
    """Return the p-value of a deviation of `off` standard errors.

    Inside the interval it is the share of resamples that deviate as much. Beyond its end the largest resamples are
    extrapolated by a power law, because corrections for many comparisons need smaller p-values than one resample (Hill,
    A Simple General Approach to Inference About the Tail of a Distribution, 1975).
    """
    if drawn is None:
        return beyond(off, count - 1)
    tail = drawn[-_tail(drawn) :]
    if off <= tail[0]:
        return float((drawn >= off).sum() + 1) / (len(drawn) + 1)
    steep = 1 / max(float(np.log(tail / tail[0]).mean()), ROUNDING)
    return len(tail) / len(drawn) * float(tail[0] / off) ** steep if np.isfinite(tail).all() else LEVEL


def _tail(drawn: np.ndarray) -> int:
    return max(1, round(LEVEL * len(drawn)))


@cache
def student(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    low, high = 1.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle, degrees) > LEVEL else (low, middle)
    return (low + high) / 2


def beyond(off: float, degrees: int) -> float:
    """Return the two-sided tail probability of Student's t (Abramowitz and Stegun, 26.7.3, 26.7.4 and 26.7.8)."""
    if degrees > 200:
        return erfc(off * (1 - 1 / (4 * degrees)) / sqrt(2 + off * off / degrees))  # 26.7.8
    angle = atan(off / sqrt(degrees))
    odd, term, total = degrees % 2, cos(angle) if degrees % 2 else 1.0, 0.0
    for at in range(1 + odd, degrees, 2):
        total, term = total + term, term * cos(angle) ** 2 * at / (at + 1)
    within = 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
    return max(0.0, 1 - within)


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
