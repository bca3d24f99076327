"""Patterns in expert ids: overlap between tokens, interleaved texts, context resets, ids that continue over layers."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

import numpy as np

SHORTEST_STRIDE = 8
FEWEST_DIPS = 4  #: three low positions in line occur by chance in a few thousand tokens, four hardly ever
SIGMAS = 5.0
WIDEST = 256  #: texts of a batch that are looked for
ROWS = 4096  #: that are compared
FEWEST_TURNS = 8  #: rows per text, below which a distance is chance
COPIES = 0.95  #: overlap of layers that are copies of one another
CLEARLY = 0.05  #: neighbours in a text share 0.1 to 0.4 more than strangers


def shared(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Count per row the experts of `right` (..., k) that are also in `left` (..., k), without -1."""
    found = np.zeros(np.broadcast_shapes(left.shape, right.shape)[:-1], np.int64)
    for rank in range(right.shape[-1]):
        expert = right[..., rank : rank + 1]
        found += ((left == expert) & (expert >= 0)).any(-1)
    return found


def overlap(earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Return the share (n,) of the experts of `earlier` (n, L, k) that `later` uses again; 0 if none."""
    routed = (earlier >= 0).sum((1, 2))
    return shared(later, earlier).sum(1) / np.maximum(routed, 1)


class Likeness(NamedTuple):
    """Overlap of neighbouring rows, and the overlap that chance gives."""

    share: float
    chance: float
    places: int

    def above(self, other: Likeness) -> float:
        """Return standard errors by which this one shares more above chance than the other."""
        mean = (self.share * self.places + other.share * other.places) / (self.places + other.places)
        error = sqrt(max(mean * (1 - mean), 1e-9) * (1 / self.places + 1 / other.places))
        return ((self.share - self.chance) - (other.share - other.chance)) / error


class Axes(NamedTuple):
    """Evidence in the ids on the order of the first two axes."""

    layers_first: bool | None  #: None if they do not show it
    why: str


def axes_of(requests: Iterable[np.ndarray]) -> Axes:
    """Judge whether the first axis of requests (T, L, k) is tokens, as it should be, or layers.

    Neighbouring tokens share experts of a layer. Experts of two layers have nothing but their numbers in common.
    """
    same, places, experts, k = np.zeros(2), np.zeros(2, np.int64), 1, 0
    for rows in requests:
        some = rows[:ROWS, :ROWS]
        experts, k = max(experts, int(some.max()) + 1), rows.shape[2]
        for axis, (one, other) in enumerate(((some[:-1], some[1:]), (some[:, :-1], some[:, 1:]))):
            same[axis] += shared(one, other).sum()
            places[axis] += (other >= 0).sum()
    if not places.all():
        return Axes(None, "one token or one layer: too few to judge")
    first, second = (
        Likeness(float(each), k / experts, int(of)) for each, of in zip(same / places, places, strict=True)
    )
    told = (
        f"neighbours share {first.share:.0%} of their experts along the first axis, {second.share:.0%} along the second"
    )
    low, high = sorted((first.share, second.share))
    clear = high - low > CLEARLY and high < COPIES and 2 * low > first.chance  # less is a made-up cycle
    if not clear or abs(second.above(first)) < SIGMAS:
        return Axes(None, told)
    return Axes(second.share > first.share, told)


def interleaved(rows: np.ndarray) -> int:
    """Return how many texts alternate in rows (T, L, k), as in Megatron's order of sequence before batch; 1 if none.

    It is the distance at which rows share most experts, if neighbours share clearly fewer and it divides the rows.
    """
    some = rows[:ROWS]
    distances = range(1, min(WIDEST, len(some) // FEWEST_TURNS) + 1)
    sets, routed = _sets(some), np.maximum((some >= 0).sum((1, 2)), 1)
    seen = {
        distance: float((_common(sets[:-distance], sets[distance:]) / routed[:-distance]).mean())
        for distance in distances
    }
    best = max(seen, key=lambda distance: seen[distance], default=1)
    return best if best > 1 and len(rows) % best == 0 and seen[best] > seen[1] + CLEARLY else 1


def _sets(rows: np.ndarray) -> np.ndarray:
    """Return the ids of rows (T, L, k) as bits of words (T, L, W)."""
    words, bits = np.divmod(np.maximum(rows, 0).astype(np.int64), 64)
    sets = np.zeros((*rows.shape[:2], int(words.max(initial=0)) + 1), np.uint64)
    bit = np.where(rows < 0, 0, np.left_shift(np.uint64(1), bits.astype(np.uint64)))
    for rank in range(rows.shape[2]):
        word = words[..., rank : rank + 1]
        held = np.take_along_axis(sets, word, -1) | bit[..., rank : rank + 1]
        np.put_along_axis(sets, word, held, -1)
    return sets


def _common(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Count per token (T,) the experts that two sets share."""
    return np.bitwise_count(left & right).sum((1, 2), dtype=np.int64)


def reset_stride(overlaps: np.ndarray, positions: np.ndarray, chance: float) -> int | None:
    """Return the stride at which adjacent-token overlap falls to chance, because the recorder cleared its context.

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
    """Return a hash (T,) of all rows (T, L, k) up to each one: equal while two texts route alike."""
    flat = ids.reshape(len(ids), -1).astype(np.uint64) + np.uint64(3)
    odd = np.arange(1, 2 * flat.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    rows = (flat * (odd | np.uint64(1))).sum(1, dtype=np.uint64)
    rows = (rows ^ (rows >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    places = np.arange(1, 2 * len(rows), 2, dtype=np.uint64) * np.uint64(0x94D049BB133111EB) | np.uint64(1)
    return np.cumsum(rows * places, dtype=np.uint64)


# -- Ids of all layers in one numbering: layer l has those from l * E on

MOST_SKIPPED = 16  #: layers without experts that are counted before the first


def ranges_by_layer(rows: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest id of each layer (L,) in rows (T, L, k); 0 and -1 if a layer routes nothing."""
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
    """Return E if the ids of each layer lie in its own window [n E, (n + 1) E); else None.

    Windows follow each other, and some at the start may be skipped. Without `experts`, the roundest E that fits is
    used.
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
    """Return the number from `low` to `high` divisible by the largest power of two; the least of several."""
    return max(range(low, high + 1), key=lambda number: (number & -number, -number))
