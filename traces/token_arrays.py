"""Arrays with a row per token that replays read at random: recorded ones, choice scores, shares and predictions.

A store's chunks are compressed, so each array is derived once into a memory-mapped file (`traces/derived.py`), a block
at a time; a trace may be larger than memory. A trace in memory uses its own arrays. After the T tokens each array has
the rows of rejected drafts, if the trace has a record of them.
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
    """Return a recorded token array, (T, ...), and after it the rows of rejected drafts. Raises TraceError."""
    if trace.path is None and not trace.rejects:
        return np.asarray(trace.arrays[name])

    shape = row_shape(name, trace.geometry)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first, last in token_blocks(trace, math.prod(shape), trace.rows):
            append(arrays["rows"], trace.read(name, first, last))

    return derived(trace, f"plain-{name}", {"rows": Rows(dtype_of(name), shape)}, fill)["rows"]


def choice(trace: Trace) -> np.ndarray:
    """Return the choice scores of all experts, (T, L, E) f32; these are the logits if the router ranks logits."""
    router = trace.geometry.router
    if router.family not in routers.GROUPED and trace.router_bias is None:
        return rows(trace, "logits")
    return _per_layer(trace, "choice", lambda logits, bias: routers.choice_scores(router, logits, bias))


def shares(trace: Trace) -> np.ndarray:
    """Return the shares from which gate weights are computed (`routers.shares`), (T, L, E) f32."""
    return _per_layer(trace, "shares", lambda logits, bias: routers.shares(trace.geometry.router, logits))


def _per_layer(trace: Trace, what: str, rule: Callable[[np.ndarray, np.ndarray | None], np.ndarray]) -> np.ndarray:
    """Apply a rule to the logits and the correction bias of each layer."""
    shape = row_shape("logits", trace.geometry)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first, last in token_blocks(trace, math.prod(shape), trace.rows):
            logits = trace.read("logits", first, last)
            made = np.empty(logits.shape, np.float32)
            for layer in range(trace.geometry.layers):
                bias = None if trace.router_bias is None else trace.router_bias[layer]
                made[:, layer] = rule(logits[:, layer], bias)
            append(arrays["rows"], made)

    return derived(trace, what, {"rows": Rows("<f4", shape)}, fill)["rows"]


class Sums(NamedTuple):
    """Sums over the experts that the router chose, for every token and layer."""

    assigned: np.ndarray  #: (T, L) int16, experts that the router chose
    mass: np.ndarray  #: (T, L) int64, their gate weight in UNITs; 0 without weights


def sums(trace: Trace) -> Sums:
    """Return what a token's choices add up to; adding them up in every replay would take half of its time."""
    layers = (trace.geometry.layers,)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first, last in token_blocks(trace, trace.geometry.layers * trace.geometry.k, trace.rows):
            chosen = trace.read("chosen", first, last) >= 0
            append(arrays["assigned"], chosen.sum(-1))
            if "weights" in trace.arrays:
                append(arrays["mass"], (to_units(trace.read("weights", first, last)) * chosen).sum(-1))
            else:
                append(arrays["mass"], np.zeros(chosen.shape[:2], np.int64))

    return Sums(**derived(trace, "sums", {"assigned": Rows("<i2", layers), "mass": Rows("<i8", layers)}, fill))


# -- Predictions: for every token and layer, the experts of a later layer by descending look-ahead score. A set of any
# size is a prefix. Scores are the probabilities of the target layer in UNITs; ties go to the lowest id.

ID_BITS = 16  #: of an expert


class Predicted(NamedTuple):
    """Look-ahead at one depth, of a trace or (without the axis L) of one gate."""

    order: np.ndarray  #: (T, L, E) int16, experts of layer l + d by descending score
    score: np.ndarray  #: (T, L, E) int32, scores by expert; rows without a target layer are 0


def predicted(trace: Trace, depth: int, control: str = "recorded", seed: int = 0) -> Predicted:
    """Return the predictions `depth` layers ahead; depth 0 scores each layer's own recorded logits.

    Controls keep the number and confidence of predictions but remove information: `shuffled_tokens` gives every token
    the predictions of a random other one, so only popularity remains; `shuffled_experts` assigns every token's scores
    to random experts, so nothing remains. A seed draws the same for every depth.
    """
    order, score = look(trace, (depth,), control, seed)
    return Predicted(order[0], score[0])


def look(trace: Trace, depths: Sequence[int], control: str = "recorded", seed: int = 0) -> Predicted:
    """Return the predictions of several depths, (D, T, L, E); depth d is for layer l + d."""
    row = (trace.geometry.layers, trace.geometry.experts)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for depth in depths:
            for block in _blocks(trace, depth, control, seed):
                append(arrays["order"], block.order)
                append(arrays["score"], block.score)

    name = "look-" + "-".join(map(str, depths)) + ("" if control == "recorded" else f"-{control}-{seed}")
    made = derived(trace, name, {"order": Rows("<i2", row), "score": Rows("<i4", row)}, fill)
    return Predicted(*(made[part].reshape(len(depths), -1, *row) for part in Predicted._fields))


def _blocks(trace: Trace, depth: int, control: str, seed: int) -> Iterator[Predicted]:
    """Yield the predictions of one depth, a block of tokens at a time."""
    spans = token_blocks(trace, trace.geometry.layers * trace.geometry.experts, trace.rows)
    if control == "recorded":
        yield from (rank(_scores(trace, depth, first, last)) for first, last in spans)
        return
    known, rng = predicted(trace, depth), np.random.Generator(np.random.PCG64(seed))
    if control == "shuffled_tokens":
        other = rng.permutation(trace.tokens)
        other = np.concatenate([other, rng.integers(trace.tokens, size=trace.rejects)])
        yield from (Predicted(*(part[other[first:last]] for part in known)) for first, last in spans)
    else:
        yield from (rank(rng.permuted(known.score[first:last], axis=-1)) for first, last in spans)


def _scores(trace: Trace, depth: int, first: int, last: int) -> np.ndarray:
    """Return the scores of tokens [first, last) in UNITs, (T, L, E)."""
    logits = trace.read(f"{LOOKAHEAD}{depth}" if depth else "logits", first, last)
    units = np.zeros(logits.shape, np.int32)
    for layer in range(trace.geometry.layers - depth):
        bias = None if trace.router_bias is None else trace.router_bias[layer + depth]
        units[:, layer] = to_units(routers.scores(trace.geometry.router, logits[:, layer], bias))
    return units


def rank(units: np.ndarray) -> Predicted:
    """Return the prediction for scores (..., E) in UNITs."""
    keys = -units.astype(np.int64) << ID_BITS | np.arange(units.shape[-1])  # distinct: any sort gives the same order
    keys.sort(axis=-1)
    return Predicted((keys & ((1 << ID_BITS) - 1)).astype(np.int16), units)
