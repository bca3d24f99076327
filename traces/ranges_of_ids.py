"""Which ids each layer uses, and whether they count on through the layers: layer l from l * E on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MOST_SKIPPED = 16  #: layers without experts that are counted before the first


def ranges_by_layer(rows: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest id of each layer (L,) in rows (T, L, k); 0 and -1 where a layer routes nothing."""
    least = most = None
    for ids in rows:
        low = np.where(ids < 0, np.iinfo(np.int64).max, ids).min((0, 2))
        high = ids.max((0, 2)).astype(np.int64)
        least = low if least is None else np.minimum(least, low)
        most = high if most is None else np.maximum(most, high)
    if least is None or most is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64) - 1
    return np.where(most < 0, 0, least), most


def experts_per_layer(least: np.ndarray, most: np.ndarray, experts: int | None = None) -> int | None:
    """E, if every layer's ids lie in a window of E of its own that begins at a multiple of E; None if there is none.

    Windows follow each other, after those of layers that were left out. Without `experts` the roundest E that fits.
    """
    if len(least) < 2 or (most < 0).any():
        return None
    if experts is not None:
        window = least // experts
        return experts if (window == most // experts).all() and (np.diff(window) > 0).all() else None
    layer = np.arange(len(least))
    for skipped in range(MOST_SKIPPED + 1):
        number = layer + skipped
        low = int((-(-(most + 1) // (number + 1))).max())
        high = int((least[number > 0] // number[number > 0]).min())
        if max(low, 2) <= high:
            return _roundest(max(low, 2), high)
    return None


def _roundest(low: int, high: int) -> int:
    """Of the numbers from `low` to `high` the one with the largest power of two in it; of several the least."""
    return max(range(low, high + 1), key=lambda number: (number & -number, -number))
