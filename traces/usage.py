"""How often a trace chose each expert, and how many experts a token has in each layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moereplay.traces.blocks import token_blocks
from moereplay.traces.derived import derived
from moereplay.traces.growing import Growing, Rows, append
from moereplay.traces.schema import Trace

LOOKED_AT, PLACES = 1 << 20, 16  #: choices that are looked at for a mean, in so many places of a long trace


def uses(trace: Trace) -> np.ndarray:
    """Choices of each expert over all tokens, (L, E) int64, without "not routed". Raises TraceError if damaged."""
    layers, experts, k = trace.geometry.layers, trace.geometry.experts, trace.geometry.k
    counts = np.zeros(layers * experts, np.int64)
    first = np.arange(layers)[None, :, None] * experts
    for start, stop in token_blocks(trace, layers * k):
        chosen = trace.read("chosen", start, stop).astype(np.int64)
        counts += np.bincount((chosen + first)[chosen >= 0], minlength=len(counts))
    return counts.reshape(layers, experts)


def experts_per_token(trace: Trace) -> tuple[float, ...]:
    """Return the mean experts of a token in each layer, (L,), over tokens that have any there; k where none has.

    A long trace is looked at in some places, evenly apart. Raises TraceError if damaged.
    """

    def fill(arrays: Mapping[str, Growing]) -> None:
        append(arrays["mean"], _experts_per_token(trace))

    return tuple(derived(trace, "experts-per-token", {"mean": Rows("<f8", ())}, fill)["mean"].tolist())


def chance_of(per_token: tuple[float, ...], experts: int) -> float:
    """Return what share of a token's experts another one has by chance: k / E where all layers have the same k."""
    low, high = min(per_token), max(per_token)
    mean = low if low == high else sum(count * count for count in per_token) / sum(per_token)
    return mean / experts


def _experts_per_token(trace: Trace) -> np.ndarray:
    layers, k = trace.geometry.layers, trace.geometry.k
    each = max(1, LOOKED_AT // (layers * k) // PLACES)
    starts = sorted({(trace.tokens - each) * place // (PLACES - 1) for place in range(PLACES)})
    if trace.tokens <= each * PLACES:
        starts, each = [0], trace.tokens
    choices, tokens = np.zeros((2, layers), np.int64)
    for start in starts:
        counts = (trace.read("chosen", start, start + each) >= 0).sum(-1)
        choices += counts.sum(0)
        tokens += (counts > 0).sum(0)
    return np.where(tokens, choices / np.maximum(tokens, 1), float(k))
