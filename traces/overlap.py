"""Overlap of the experts of two tokens, and context resets of a recorder."""

from __future__ import annotations

import numpy as np

SHORTEST_STRIDE = 8
FEWEST_DIPS = 4  #: three low positions in line occur by chance in a few thousand tokens, four hardly ever
SIGMAS = 5.0
WIDEST = 256  #: texts of a batch that are looked for
ROWS = 4096  #: that are compared
FEWEST_TURNS = 8  #: rows per text, below which a distance is chance
CLEARLY = 0.05  #: neighbours in a text share 0.1 to 0.4 more than strangers


def shared(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Experts of `right` (..., k) that are also in `left` (..., k), counted per row; -1 never counts."""
    found = np.zeros(np.broadcast_shapes(left.shape, right.shape)[:-1], np.int64)
    for rank in range(right.shape[-1]):
        expert = right[..., rank : rank + 1]
        found += ((left == expert) & (expert >= 0)).any(-1)
    return found


def overlap(earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Share of the experts of `earlier` (n, L, k) that `later` uses again: (n,), all layers together; 0 where none."""
    routed = (earlier >= 0).sum((1, 2))
    return shared(later, earlier).sum(1) / np.maximum(routed, 1)


def interleaved(rows: np.ndarray) -> int:
    """How many texts alternate in rows (T, L, k), as in Megatron's order of sequence before batch; 1 if none do.

    It is the distance at which rows share most experts, if neighbours share clearly fewer and it divides the rows.
    """
    some = rows[:ROWS]
    distances = range(1, min(WIDEST, len(some) // FEWEST_TURNS) + 1)
    seen = {distance: float(overlap(some[:-distance], some[distance:]).mean()) for distance in distances}
    best = max(seen, key=lambda distance: seen[distance], default=1)
    return best if best > 1 and len(rows) % best == 0 and seen[best] > seen[1] + CLEARLY else 1


def reset_stride(overlaps: np.ndarray, positions: np.ndarray, chance: float) -> int | None:
    """The stride at which adjacent-token overlap keeps falling to chance: the recorder cleared its context there.

    `overlaps` (n,) compares the tokens at `positions` (n,) of their requests with the token before each. The stride
    whose multiples lie most standard errors below the mean wins; None if their mean is not near `chance`.
    """
    counts = np.bincount(positions)
    sums = np.bincount(positions, overlaps)
    mean, spread = float(overlaps.mean()), float(overlaps.std())
    near_chance = chance + 0.25 * (mean - chance)
    best, stride = SIGMAS, None
    for candidate in range(SHORTEST_STRIDE, (len(counts) - 1) // FEWEST_DIPS + 1):
        samples = int(counts[candidate::candidate].sum())
        level = sums[candidate::candidate].sum() / max(samples, 1)
        sigmas = (mean - level) * np.sqrt(samples) / max(spread, 1e-9)
        if level <= near_chance and sigmas > best:
            best, stride = sigmas, candidate
    return stride


def beginnings(ids: np.ndarray) -> np.ndarray:
    """Numbers (T,) that stand for all rows (T, L, k) up to each one: equal where two texts route alike so far."""
    flat = ids.reshape(len(ids), -1).astype(np.uint64) + np.uint64(3)
    odd = np.arange(1, 2 * flat.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    rows = (flat * (odd | np.uint64(1))).sum(1, dtype=np.uint64)
    rows = (rows ^ (rows >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    places = np.arange(1, 2 * len(rows), 2, dtype=np.uint64) * np.uint64(0x94D049BB133111EB) | np.uint64(1)
    return np.cumsum(rows * places, dtype=np.uint64)
