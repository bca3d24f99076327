"""Rank correlation of small samples, and how sure a difference between two ratios is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Student's t at 97.5 %, by degrees of freedom from 1 on; beyond these 1.96 + 2.6 / degrees is right to 0.01.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

Pairs = Sequence[tuple[float, float]]  #: numerator and denominator of each sample


def ranks(values: Sequence[float]) -> np.ndarray:
    """(n,) float64: 1 for the smallest; ties share the mean of the ranks that they would take."""
    taken = np.asarray(values, np.float64)
    below = (taken[None, :] < taken[:, None]).sum(axis=1)
    equal = (taken[None, :] == taken[:, None]).sum(axis=1)
    return below + (equal + 1) / 2


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties by mean rank; None if either is constant. Raises ValueError for other lengths.

    Spearman 1904; with ties, Pearson's correlation of the mean ranks (Kendall, Rank Correlation Methods, ch. 3).
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values beside {len(second)}: expected as many")
    ours, theirs = (ranks(values) - (len(values) + 1) / 2 for values in (first, second))
    spread = float((ours @ ours) * (theirs @ theirs)) ** 0.5
    return float(ours @ theirs) / spread if spread else None


def uncertainty(first: Pairs, second: Pairs) -> float | None:
    """Half the 95 % interval of the difference of two ratios of sums over the same samples; None of fewer than two.

    The jackknife of paired samples, which leaves out one after the other (Efron, The Jackknife, the Bootstrap and Other
    Resampling Plans, 1982, ch. 3). Raises ValueError for other lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} samples beside {len(second)}: expected as many")
    ours, theirs = (np.asarray(pairs, np.float64).reshape(-1, 2) for pairs in (first, second))
    left = [pairs.sum(axis=0) - pairs for pairs in (ours, theirs)]
    count = len(ours)
    if count < 2 or any((each[:, 1] <= 0).any() for each in left):
        return None
    apart = left[0][:, 0] / left[0][:, 1] - left[1][:, 0] / left[1][:, 1]
    error = float(((apart - apart.mean()) ** 2).sum() * (count - 1) / count) ** 0.5
    return _student(count - 1) * error


def _student(degrees: int) -> float:
    return STUDENT[degrees - 1] if degrees <= len(STUDENT) else 1.96 + 2.6 / degrees
