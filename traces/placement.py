"""What of a model's experts a memory of so many bytes holds, in engines that do not move them while they run.

Engines keep either the experts of whole layers, or the same number of experts in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from moereplay.traces.schema import Geometry


def experts_per_layer(geometry: Geometry, cache_bytes: int) -> int:
    """Experts of each layer that are held if every layer gets the same number."""
    return min(cache_bytes // sum(geometry.expert_bytes), geometry.experts)


def mean_experts(geometry: Geometry, cache_bytes: int) -> int:
    """Return how many experts of mean size are held, at most all of them."""
    everything = geometry.layers * geometry.experts
    return min(cache_bytes * geometry.layers // sum(geometry.expert_bytes), everything)


def last_layers(geometry: Geometry, cache_bytes: int) -> int:
    """How many layers, counted from the last one back, have all their experts held."""
    needed = np.cumsum(geometry.expert_bytes[::-1]) * geometry.experts
    return int(np.searchsorted(needed, cache_bytes, "right"))


def held_layers(geometry: Geometry, cache_bytes: int, order: Iterable[int]) -> list[int]:
    """Layers whose experts are all held, ascending: each of `order` in turn that still fits."""
    held, left = [], cache_bytes
    for layer in order:
        size = geometry.expert_bytes[layer] * geometry.experts
        if size <= left:
            held.append(layer)
            left -= size
    return sorted(held)


def layers_by_worth(geometry: Geometry, scores: np.ndarray) -> list[int]:
    """All layers, most of `scores` (L, E) per byte first, of equals the later one, as `--n-cpu-moe` keeps the last."""
    worth = scores.sum(axis=1) / np.array(geometry.expert_bytes)
    return sorted(range(geometry.layers), key=lambda layer: (-worth[layer], -layer))
