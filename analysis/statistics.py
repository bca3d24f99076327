"""Rank correlation of small samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
