"""Predicted sets: for every token and layer, the experts of a later layer by descending look-ahead score.

A prediction of any size is a prefix of that order. Scores are the target layer's probabilities (its scoring function),
in UNITs; ties go to the lowest id.

Controls take the prediction out of predictions, and leave how many and how sure they are: `shuffled_tokens` gives every
token those of another one drawn at random (what remains is popularity), `shuffled_experts` gives every token's scores
to experts drawn at random (nothing remains).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from traces import routers
from traces.demand import to_units
from traces.derived import derived
from traces.schema import LOOKAHEAD, Trace

TOKENS_AT_ONCE = 4096
CONTROLS = ("recorded", "shuffled_tokens", "shuffled_experts")


class Predicted(NamedTuple):
    """Look-ahead at one depth, of a trace or (without the axis L) of one gate."""

    order: np.ndarray  #: (T, L, E) int16, experts of layer l + d by descending score
    score: np.ndarray  #: (T, L, E) int32, scores by expert; rows without a target layer are 0


def predicted(trace: Trace, depth: int, control: str = "recorded", seed: int = 0) -> Predicted:
    """The predictions `depth` layers ahead; depth 0 scores each layer's own recorded logits.

    `control` is one of CONTROLS; a seed draws the same for every depth.
    """
    if control == "recorded":
        return _known(trace, f"lookahead-{depth}", lambda: _derive(trace, depth))
    shuffle = _among_tokens if control == "shuffled_tokens" else _among_experts
    rng = np.random.Generator(np.random.PCG64(seed))
    return _known(trace, f"lookahead-{depth}-{control}-{seed}", lambda: shuffle(predicted(trace, depth), rng))


def _known(trace: Trace, name: str, derive: Callable[[], Predicted]) -> Predicted:
    return Predicted(**derived(trace, name, Predicted._fields, lambda: derive()._asdict()))


def _among_tokens(known: Predicted, rng: np.random.Generator) -> Predicted:
    other = rng.permutation(len(known.order))
    return Predicted(known.order[other], known.score[other])


def _among_experts(known: Predicted, rng: np.random.Generator) -> Predicted:
    return rank(rng.permuted(known.score, axis=-1))


def _derive(trace: Trace, depth: int) -> Predicted:
    parts = [rank(units) for _, units in scores_of(trace, depth)]
    return Predicted(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def scores_of(trace: Trace, depth: int) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of (tokens, L, E) scores in UNITs, each with its first token."""
    name = f"{LOOKAHEAD}{depth}" if depth else "logits"
    router, layers = trace.geometry.router, trace.geometry.layers
    for start in range(0, trace.tokens, TOKENS_AT_ONCE):
        logits = trace.read(name, start, min(start + TOKENS_AT_ONCE, trace.tokens))
        units = np.zeros(logits.shape, np.int32)
        for layer in range(layers - depth):
            bias = None if trace.router_bias is None else trace.router_bias[layer + depth]
            units[:, layer] = to_units(routers.scores(router, logits[:, layer], bias))
        yield start, units


def rank(units: np.ndarray) -> Predicted:
    """The prediction that scores (..., E) in UNITs make."""
    return Predicted(np.argsort(-units, axis=-1, kind="stable").astype(np.int16), units)
