"""Rows of one expert each, put together to rows of a token at a layer: ranks in the order of the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from moereplay.traces.importers.rows import Rows
from moereplay.traces.schema import TraceError

SAID = "a row per expert, ranks in the order of rows"


def width_of(requests: Iterable[Rows], unit: str) -> int:
    """How many rows a token has at a layer. Raises TraceError naming the row, a `unit`, of one that has fewer."""
    first: dict[int, str] = {}
    for rows in requests:
        starts, order = _groups(rows)
        counts = np.diff(np.append(starts, len(order)))
        for count, at in zip(*np.unique(counts, return_index=True), strict=True):
            first.setdefault(int(count), f"{rows.file} {unit} {rows.lines[order[starts[at]]]}")
        if counts.min() == counts.max():
            gathered(rows, int(counts[0]))  # an expert that stands twice is refused before anything is written
    k = max(first)
    if short := [(count, place) for count, place in first.items() if count != k]:
        count, place = short[0]
        fix = "expected as many of every token at every layer; add rows with expert -1 where fewer were routed"
        raise TraceError(f"{place}: its token has {count} rows at this layer, others have {k}; {fix}")
    return k


def gathered(rows: Rows, k: int) -> Rows:
    """The rows of one request, k experts in each."""
    starts, order = _groups(rows)
    first = order[starts]
    return replace(
        rows,
        lines=rows.lines[first],
        request=rows.request[first],
        token=rows.token[first],
        layer=rows.layer[first],
        experts=rows.experts[order].reshape(-1, k),
        weights=None if rows.weights is None else rows.weights[order].reshape(-1, k),
        phase=None if rows.phase is None else rows.phase[first],
    )


def _groups(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Where each token at a layer begins, in an order of the rows (N,) by both."""
    order = np.lexsort((rows.layer, rows.token))
    keys = np.stack([rows.token, rows.layer])[:, order]
    return np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])), order
