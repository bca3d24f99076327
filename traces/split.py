"""Requests of a trace in two: those that something is fitted to, and the others, on which it is tried."""

from __future__ import annotations

import random

import numpy as np

from traces.profiles.contract import ranked
from traces.schema import Trace, TraceError

BLOCK = 1 << 14  #: tokens counted at a time


def split(requests: int, share: float = 0.5, seed: int = 0) -> tuple[list[int], list[int]]:
    """Numbers of the requests to fit to, a share drawn by the seed, and of the others, both in the trace's order.

    Raises TraceError if either would be empty.
    """
    if not 0 < share < 1 or requests < 2:
        raise TraceError(f"{requests} requests at a share of {share:g}: a split needs two, and a share between 0 and 1")
    count = min(max(round(share * requests), 1), requests - 1)
    fitted = set(random.Random(seed).sample(range(requests), count))
    return sorted(fitted), [at for at in range(requests) if at not in fitted]


def profile(trace: Trace) -> list[tuple[int, int]]:
    """(layer, expert) of all that the trace chose, the most often chosen first, ties by layer and expert."""
    geometry = trace.geometry
    counts = np.zeros(geometry.layers * geometry.experts, np.int64)
    first = np.arange(geometry.layers)[None, :, None] * geometry.experts
    for start in range(0, trace.tokens, BLOCK):
        chosen = trace.read("chosen", start, min(start + BLOCK, trace.tokens)).astype(np.int64) + first
        counts += np.bincount(chosen.ravel(), minlength=len(counts))
    return ranked(counts.reshape(geometry.layers, geometry.experts))
