"""Least squares with no weight below zero, so that what is fitted only rises (Lawson & Hanson 1974, ch. 23)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TOLERANCE = 1e-10  #: of a gradient, beside the largest at the start
MOST_STEPS = 100


def nonnegative(columns: Array, target: Array) -> Array:
    """The weights (c,) >= 0 for which columns (n, c) @ weights is nearest to target (n,)."""
    size = np.linalg.norm(columns, axis=0)
    scaled = columns / np.where(size > 0, size, 1)
    weights, used = np.zeros(len(size)), np.zeros(len(size), bool)
    least = TOLERANCE * max(float(np.abs(scaled.T @ target).max(initial=0)), 1e-300)
    for _ in range(MOST_STEPS):
        uphill = np.where(used | (size == 0), -np.inf, scaled.T @ (target - scaled @ weights))
        if not len(size) or uphill.max() <= least:
            break
        used[uphill.argmax()] = True
        weights, used = _feasible(scaled, target, weights, used)
    return weights / np.where(size > 0, size, 1)


def _feasible(
    columns: Array, target: Array, weights: Array, used: NDArray[np.bool_]
) -> tuple[Array, NDArray[np.bool_]]:
    """The best weights of the used columns; a column whose weight would fall to zero on the way is used no more."""
    while used.any():
        best = np.zeros_like(weights)
        best[used] = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        below = used & (best <= 0)
        if not below.any():
            return best, used
        way = (weights[below] / np.maximum(weights[below] - best[below], 1e-300)).min()
        weights = weights + way * (best - weights)
        used = used & (weights > 1e-15)
    return np.zeros_like(weights), used
