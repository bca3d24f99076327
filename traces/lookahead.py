"""Predicted sets: for every token and layer, the experts of a later layer by descending look-ahead score.

A prediction of any size is a prefix of that order. Scores are the target layer's probabilities (its scoring function),
in UNITs; ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from traces import routers
from traces.demand import to_units
from traces.derived import derived
from traces.schema import LOOKAHEAD, Trace

TOKENS_AT_ONCE = 4096


class Predicted(NamedTuple):
    """Look-ahead at one depth, of a trace or (without the axis L) of one gate."""

    order: np.ndarray  #: (T, L, E) int16, experts of layer l + d by descending score
    score: np.ndarray  #: (T, L, E) int32, scores by expert; rows without a target layer are 0


def predicted(trace: Trace, depth: int) -> Predicted:
    """The predictions `depth` layers ahead; depth 0 scores each layer's own recorded logits."""
    return Predicted(**derived(trace, f"lookahead-{depth}", Predicted._fields, lambda: _derive(trace, depth)._asdict()))


def _derive(trace: Trace, depth: int) -> Predicted:
    parts = [rank(units) for units in _scores(trace, depth)]
    return Predicted(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _scores(trace: Trace, depth: int) -> Iterator[np.ndarray]:
    """Blocks of (tokens, L, E) scores in UNITs."""
    name = f"{LOOKAHEAD}{depth}" if depth else "logits"
    router, layers = trace.geometry.router, trace.geometry.layers
    for start in range(0, trace.tokens, TOKENS_AT_ONCE):
        logits = trace.read(name, start, min(start + TOKENS_AT_ONCE, trace.tokens))
        units = np.zeros(logits.shape, np.int32)
        for layer in range(layers - depth):
            bias = None if trace.router_bias is None else trace.router_bias[layer + depth]
            units[:, layer] = to_units(routers.scores(router, logits[:, layer], bias))
        yield units


def rank(units: np.ndarray) -> Predicted:
    """The prediction that scores (..., E) in UNITs make."""
    return Predicted(np.argsort(-units, axis=-1, kind="stable").astype(np.int16), units)
