"""How often a trace chose each expert: what placements and profiles are made of."""

from __future__ import annotations

import numpy as np

from traces.blocks import token_blocks
from traces.schema import Trace


def uses(trace: Trace) -> np.ndarray:
    """Choices of each expert over all tokens, (L, E) int64, without "not routed". Raises TraceError if damaged."""
    layers, experts, k = trace.geometry.layers, trace.geometry.experts, trace.geometry.k
    counts = np.zeros(layers * experts, np.int64)
    first = np.arange(layers)[None, :, None] * experts
    for start, stop in token_blocks(trace, layers * k):
        chosen = trace.read("chosen", start, stop).astype(np.int64)
        counts += np.bincount((chosen + first)[chosen >= 0], minlength=len(counts))
    return counts.reshape(layers, experts)
