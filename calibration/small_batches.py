"""Cut a trace to the batches that llama.cpp's expert cache sees: those of few tokens; longer prompts bypass it.

Read in llama.cpp's src/llama-moe-cache.cpp of October 2026, and confirmed by its own counts (docs/logs.md).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moereplay.traces.schema import Geometry, Request, Trace, TraceError, memory_trace

MOST_TOKENS = 32  #: of a batch that looks experts up; larger ones only copy what happens to be there
AT_ONCE = 512  #: tokens of a batch at most


def most_tokens(geometry: Geometry, slots: int) -> int:
    """Return the largest batch that a cache of `slots` experts takes: all experts that it may choose must fit."""
    fits = [tokens for tokens in range(1, MOST_TOKENS + 1) if min(tokens * geometry.k, geometry.experts) <= slots]
    if not fits:
        raise TraceError(f"a cache of {slots} experts cannot hold the {geometry.k} of one token; llama.cpp refuses it")
    return max(fits)


def small_batches(trace: Trace, most: int, layers: frozenset[int] | None = None) -> Trace:
    """Return in memory what batches of at most `most` tokens choose, of these layers, as prompts and single tokens.

    Of a longer prompt only its last layer's choice for its last token is left: that layer runs for this token alone,
    because nothing else is asked for.
    """
    header = trace.header
    other = [layer for layer in range(trace.geometry.layers) if layers is not None and layer not in layers]
    requests = []
    for (first, last), length in zip(
        pairwise(trace.request_offsets.tolist()), trace.prompt_lengths.tolist(), strict=True
    ):
        rows, prompt = _of_request(trace.read("chosen", first, last), length, most)
        rows[:, other] = -1
        requests.append(Request(rows, prompt))
    return memory_trace(header.model_copy(update={"lookahead_depth": 0}), requests)


def _of_request(chosen: np.ndarray, prompt: int, most: int) -> tuple[np.ndarray, int]:
    """Return the rows of a request (T, L, k) that the cache sees, and how many of them are the prompt's."""
    if not prompt:
        return chosen.copy(), 0
    part = (prompt - 1) % AT_ONCE + 1  # the last batch of the prompt
    kept = chosen[prompt - (part if part <= most else 1) :].copy()
    if part > most:
        kept[0, :-1] = -1
        return kept, 1
    kept[: part - 1, -1] = -1
    return kept, part
