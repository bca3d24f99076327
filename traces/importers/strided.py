"""Ids that a recorder read flat from a strided view: what it took for the chosen is whole rankings of all experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEWEST_PER_EXPERT = 8  #: choices of each expert: with fewer, even use may be chance
FEWEST_EXPERTS = 16
SPREAD = 0.25  #: of the mean; of even random choices a layer's most and least used differ by more than the mean
NOTE = "every expert is chosen equally often at each layer, as in no model: a strided view was read flat; record again"


def read_flat(ids: np.ndarray, experts: int) -> bool:
    """Whether the ids (T, L, k) of a prompt are rankings of all experts: each of them as often as any other."""
    routed = ids[(ids >= 0).all((1, 2))]
    return equally_often([np.bincount(routed[:, at].ravel(), minlength=experts) for at in range(routed.shape[1])])


def equally_often(counts: Sequence[np.ndarray]) -> bool:
    """Whether a layer's experts (E,) were chosen about as often as each other, and often enough, at every layer."""
    return all(
        len(each) >= FEWEST_EXPERTS
        and each.sum() >= FEWEST_PER_EXPERT * len(each)
        and float(np.ptp(each)) <= SPREAD * float(each.mean())
        for each in counts
    )
