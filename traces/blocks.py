"""Blocks of tokens: what is derived from a trace needs no more memory for a long one than for a short one."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.traces.schema import Trace

VALUES_AT_ONCE = 1 << 20  #: of an array; working on it takes some ten arrays of 64 bits, about 100 MB
SHARD = 512  #: tokens of a default store's file: none is decoded twice


def tokens_at_once(values: int) -> int:
    """Tokens of a block, where each has so many values."""
    return max(1, VALUES_AT_ONCE // values // SHARD) * SHARD


def token_blocks(trace: Trace, values: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of all tokens, each of `values` values."""
    size = tokens_at_once(values)
    for first in range(0, trace.tokens, size):
        yield first, min(first + size, trace.tokens)
