"""A trace as rows, one per token and layer, some tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moereplay.traces.growing import token_blocks
from moereplay.traces.schema import Trace

#: Times as large as an array's numbers are those that Python holds.
OBJECTS = 8


class Block(NamedTuple):
    """Some tokens, of one request or several."""

    request: np.ndarray  #: (T,)
    token: np.ndarray  #: (T,) from 0 in each request
    phase: np.ndarray  #: (T,) 0 for prompt tokens, 1 for decoded ones
    chosen: np.ndarray  #: (T, L, k)
    weights: np.ndarray | None  #: (T, L, k)
    logits: np.ndarray | None  #: (T, L, E)


def blocks(trace: Trace, first: int = 0, last: int | None = None, logits: bool = True) -> Iterator[Block]:
    """Tokens [first, last), a block at a time; `logits` says whether to read them. Raises TraceError if damaged."""
    logits = logits and "logits" in trace.arrays
    width = trace.geometry.layers * (trace.geometry.experts if logits else trace.geometry.k)
    for start, stop in token_blocks(trace, width * OBJECTS):
        begin, end = max(start, first), min(stop, trace.tokens if last is None else last)
        if begin < end:
            yield _block(trace, begin, end, logits)


def _block(trace: Trace, begin: int, end: int, logits: bool) -> Block:
    at = np.arange(begin, end)
    request = np.searchsorted(trace.request_offsets, at, "right") - 1
    token = at - trace.request_offsets[request]
    return Block(
        request=request,
        token=token,
        phase=(token >= trace.prompt_lengths[request]).astype(np.int64),
        chosen=trace.read("chosen", begin, end),
        weights=trace.read("weights", begin, end) if "weights" in trace.arrays else None,
        logits=trace.read("logits", begin, end) if logits else None,
    )


def number(value: float) -> float:
    """A float32 that is written with nine digits, which any reader rounds back to the same float32."""
    return float(f"{value:.9g}")
