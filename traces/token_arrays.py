"""Token arrays as plain memory-mapped files, which a compiled replay reads at random.

Compressed chunks are for keeping; these are made once beside the trace (`traces/derived.py`), a block at a time, so
that a trace may be larger than memory. A trace in memory gives its own arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moereplay.traces import routers
from moereplay.traces.derived import derived
from moereplay.traces.growing import Growing, Rows, append, token_blocks
from moereplay.traces.routers import to_units
from moereplay.traces.schema import LOOKAHEAD, Trace, dtype_of, row_shape


def rows(trace: Trace, name: str) -> np.ndarray:
    """A token array of the trace as it is, (T, ...). Raises TraceError."""
    if trace.path is None:
        return np.asarray(trace.arrays[name])

    shape = row_shape(name, trace.geometry)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first, last in token_blocks(trace, math.prod(shape)):
            append(arrays["rows"], trace.read(name, first, last))

    return derived(trace, f"plain-{name}", {"rows": Rows(dtype_of(name), shape)}, fill)["rows"]


def choice(trace: Trace) -> np.ndarray:
    """Choice scores of all experts, (T, L, E) f32; the logits themselves where those are ranked."""
    router = trace.geometry.router
    if router.family not in routers.GROUPED and trace.router_bias is None:
        return rows(trace, "logits")
    return _per_layer(trace, "choice", lambda logits, bias: routers.choice_scores(router, logits, bias))


def shares(trace: Trace) -> np.ndarray:
    """What gate weights are made of (`routers.shares`), (T, L, E) f32."""
    return _per_layer(trace, "shares", lambda logits, bias: routers.shares(trace.geometry.router, logits))


def _per_layer(trace: Trace, what: str, rule: Callable[[np.ndarray, np.ndarray | None], np.ndarray]) -> np.ndarray:
    """A rule over each layer's logits and correction bias."""
    shape = row_shape("logits", trace.geometry)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first, last in token_blocks(trace, math.prod(shape)):
            logits = trace.read("logits", first, last)
            made = np.empty(logits.shape, np.float32)
            for layer in range(trace.geometry.layers):
                bias = None if trace.router_bias is None else trace.router_bias[layer]
                made[:, layer] = rule(logits[:, layer], bias)
            append(arrays["rows"], made)

    return derived(trace, what, {"rows": Rows("<f4", shape)}, fill)["rows"]


# -- Predicted sets: for every token and layer, the experts of a later layer by descending look-ahead score.

ID_BITS = 16  #: of an expert


class Predicted(NamedTuple):
    """Look-ahead at one depth, of a trace or (without the axis L) of one gate."""

    order: np.ndarray  #: (T, L, E) int16, experts of layer l + d by descending score
    score: np.ndarray  #: (T, L, E) int32, scores by expert; rows without a target layer are 0


def predicted(trace: Trace, depth: int, control: str = "recorded", seed: int = 0) -> Predicted:
    """The predictions `depth` layers ahead; depth 0 scores each layer's own recorded logits.

    `control` is recorded, shuffled_tokens or shuffled_experts; a seed draws the same for every depth.
    """
    order, score = look(trace, (depth,), control, seed)
    return Predicted(order[0], score[0])


def look(trace: Trace, depths: Sequence[int], control: str = "recorded", seed: int = 0) -> Predicted:
    """The same of several depths, (D, T, L, E): depth d is for layer l + d."""
    geometry = trace.geometry
    rows = (geometry.layers, geometry.experts)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for depth in depths:
            for block in _blocks(trace, depth, control, seed):
                append(arrays["order"], block.order)
                append(arrays["score"], block.score)

    name = "look-" + "-".join(map(str, depths)) + ("" if control == "recorded" else f"-{control}-{seed}")
    made = derived(trace, name, {"order": Rows("<i2", rows), "score": Rows("<i4", rows)}, fill)
    return Predicted(*(made[part].reshape(len(depths), -1, *rows) for part in Predicted._fields))


def _blocks(trace: Trace, depth: int, control: str, seed: int) -> Iterator[Predicted]:
    """A depth's predictions, a block of tokens at a time."""
    spans = token_blocks(trace, trace.geometry.layers * trace.geometry.experts)
    if control == "recorded":
        yield from (rank(_scores(trace, depth, first, last)) for first, last in spans)
        return
    known, rng = predicted(trace, depth), np.random.Generator(np.random.PCG64(seed))
    if control == "shuffled_tokens":
        other = rng.permutation(trace.tokens)
        yield from (Predicted(*(part[other[first:last]] for part in known)) for first, last in spans)
    else:
        yield from (rank(rng.permuted(known.score[first:last], axis=-1)) for first, last in spans)


def _scores(trace: Trace, depth: int, first: int, last: int) -> np.ndarray:
    """Scores of tokens [first, last) in UNITs, (T, L, E)."""
    logits = trace.read(f"{LOOKAHEAD}{depth}" if depth else "logits", first, last)
    units = np.zeros(logits.shape, np.int32)
    for layer in range(trace.geometry.layers - depth):
        bias = None if trace.router_bias is None else trace.router_bias[layer + depth]
        units[:, layer] = to_units(routers.scores(trace.geometry.router, logits[:, layer], bias))
    return units


def rank(units: np.ndarray) -> Predicted:
    """The prediction that scores (..., E) in UNITs make."""
    keys = -units.astype(np.int64) << ID_BITS | np.arange(units.shape[-1])  # distinct: any sort gives the same order
    keys.sort(axis=-1)
    return Predicted((keys & ((1 << ID_BITS) - 1)).astype(np.int16), units)
