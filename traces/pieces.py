"""Pieces: rows of many requests in blocks of bounded size, so that long traces are copied in little memory.

A piece ends where a request ends, or lies within one request that is longer than a piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moereplay.traces.growing import tokens_at_once
from moereplay.traces.schema import (
    MOST_BIAS,
    Header,
    RowError,
    Trace,
    TraceError,
    Values,
    check_drafts,
    check_ids,
    check_shape,
    check_values,
    dtype_of,
    first_refused,
    row_shape,
)
from moereplay.traces.values import DRAFT


class Piece(NamedTuple):
    """Consecutive rows of token arrays and the requests that end in them; the last of these ends with the last row."""

    arrays: Mapping[str, np.ndarray]  #: by name, (T, ...) each; (D, ...) those of rejected drafts
    lengths: np.ndarray  #: (n,) int64: tokens of each request that ends here, those of earlier pieces among them
    prompts: np.ndarray  #: (n,) int64: their prompt tokens

    @property
    def tokens(self) -> int:
        """Rows of the piece."""
        return len(self.arrays["chosen"])

    @property
    def rejected(self) -> int:
        """Rows of rejected drafts."""
        return len(self.arrays.get(f"{DRAFT}chosen", ()))


def pieces(trace: Trace, first: int, last: int, names: Sequence[str]) -> Iterator[Piece]:
    """Yield requests [first, last) with these arrays; whole requests if `drafts` is one of them.

    Raises TraceError for damaged rows.
    """
    values = sum(math.prod(row_shape(name, trace.geometry)) for name in names)  # per token
    offsets, size = trace.request_offsets, tokens_at_once(values)
    request, begin, end = first, int(offsets[first]), int(offsets[last])
    verified = trace.verified if "drafts" in names else None
    while begin < end:
        done = int(np.searchsorted(offsets, begin + size, "right")) - 1
        done = min(max(done, request + (verified is not None)), last)
        stop = int(offsets[done]) if done > request else begin + size
        arrays = {name: trace.read(name, begin, stop) for name in names}
        if verified:
            span = verified.span(begin, stop)[1]
            rejected = trace.rejected_rows(names, span.start, span.stop)
            arrays |= {f"{DRAFT}{name}": rows for name, rows in rejected.items()}
        yield Piece(arrays, np.diff(offsets[request : done + 1]), trace.prompt_lengths[request:done])
        request, begin = done, stop


def check_piece(piece: Piece, header: Header, index: int, begun: int) -> dict[str, np.ndarray]:
    """Return the arrays of a piece as stored; it begins in request `index`, after `begun` tokens of that request.

    Raises RowError naming the request and the row.
    """
    try:
        _check_ranges(piece, begun)
        if "drafts" in piece.arrays:
            _check_whole(piece, begun)
        for name, rows in piece.arrays.items():
            check_shape(name, rows, piece.arrays, header.geometry)
            check_values(rows, name, name)
        check_ids(piece.arrays, header.geometry)
    except TraceError as wrong:
        raise RowError(f"request {index}: {wrong}") from None
    return {name: np.ascontiguousarray(rows, dtype_of(name)) for name, rows in piece.arrays.items()}


def _check_whole(piece: Piece, begun: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(piece.lengths)])
    if begun or offsets[-1] != piece.tokens:
        raise TraceError("drafts came with a part of a request: expected whole requests")
    check_drafts(piece.arrays, offsets, piece.prompts)


def _check_ranges(piece: Piece, begun: int) -> None:
    if not piece.tokens or (len(piece.lengths) and int(piece.lengths.sum()) != begun + piece.tokens):
        raise TraceError(f"{begun + piece.tokens} tokens came for requests of {int(piece.lengths.sum())}")
    if len(piece.lengths) != len(piece.prompts) or (piece.lengths < 1).any():
        raise TraceError(f"{len(piece.lengths)} requests with {len(piece.prompts)} prompts; each needs a token")
    if ((piece.prompts < 0) | (piece.prompts > piece.lengths)).any():
        raise TraceError("a prompt is longer than its request: expected 0 to the request's tokens")


# -- `router_bias`, (L, E) f32: a correction that some routers add to scores for choosing experts, not for weighing them


def check_bias(bias: np.ndarray, where: str) -> None:
    """Raise TraceError unless a router's correction bias (L, E) is finite and small enough for scores in UNITs."""
    at = first_refused(bias, Values("f", -MOST_BIAS, MOST_BIAS))
    if at is not None:
        layer, expert = at
        raise TraceError(
            f"{where}: router_bias of layer {layer}, expert {expert} is {bias[at]}: "
            f"expected a number from -{MOST_BIAS} to {MOST_BIAS}"
        )


def checked_bias(bias: np.ndarray | None, header: Header) -> np.ndarray | None:
    """Return a router's correction bias as stored, (L, E) f32. Raises TraceError for another shape or range."""
    if bias is None:
        return None
    expected = (header.geometry.layers, header.geometry.experts)
    checked = np.ascontiguousarray(bias, "<f4")
    if checked.shape != expected or not np.isfinite(checked).all():
        raise TraceError(f"router_bias has shape {checked.shape}, expected finite numbers of shape {expected}")
    check_bias(checked, "this model")
    return checked


def same_bias(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Return True if two traces have equal biases, or none."""
    return one is other if one is None or other is None else np.array_equal(one, other)
