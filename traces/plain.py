"""Token arrays as plain memory-mapped files: what is read at random, again and again, by a compiled replay.

Compressed chunks are for keeping; these are made once beside the trace (`traces/derived.py`), a block at a time, so
that a trace may be larger than memory. A trace in memory gives its own arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from traces import routers
from traces.derived import filled
from traces.lookahead import TOKENS_AT_ONCE, Predicted, predicted, scores_of
from traces.schema import Trace, dtype_of, row_shape


def rows(trace: Trace, name: str) -> np.ndarray:
    """A token array of the trace as it is, (T, ...). Raises TraceError."""
    if trace.path is None:
        return np.asarray(trace.arrays[name])

    def fill(arrays: Mapping[str, np.ndarray]) -> None:
        for first, last in _blocks(trace):
            arrays["rows"][first:last] = trace.read(name, first, last)

    shape = (trace.tokens, *row_shape(name, trace.geometry))
    return filled(trace, f"plain-{name}", {"rows": (dtype_of(name), shape)}, fill)["rows"]


def choice(trace: Trace) -> np.ndarray:
    """Choice scores of all experts, (T, L, E) f32; the logits themselves where those are ranked."""
    router = trace.geometry.router
    if router.family not in routers.GROUPED and trace.router_bias is None:
        return rows(trace, "logits")
    return _per_layer(trace, "choice", lambda logits, bias: routers.choice_scores(router, logits, bias))


def shares(trace: Trace) -> np.ndarray:
    """What gate weights are made of (`routers.shares`), (T, L, E) f32."""
    return _per_layer(trace, "shares", lambda logits, bias: routers.shares(trace.geometry.router, logits))


def look(trace: Trace, depths: Sequence[int], control: str = "recorded", seed: int = 0) -> Predicted:
    """Predictions of several depths, (D, T, L, E): depth d is for layer l + d, depth 0 is the layer's own scores.

    `control` and `seed` are those of `lookahead.predicted`.
    """
    shape = (len(depths), trace.tokens, trace.geometry.layers, trace.geometry.experts)

    def fill(arrays: Mapping[str, np.ndarray]) -> None:
        for at, depth in enumerate(depths):
            if control != "recorded":
                arrays["order"][at], arrays["score"][at] = predicted(trace, depth, control, seed)
                continue
            for first, units in scores_of(trace, depth):
                span = slice(first, first + len(units))
                arrays["order"][at, span] = np.argsort(-units, axis=-1, kind="stable")
                arrays["score"][at, span] = units

    name = "look-" + "-".join(map(str, depths)) + ("" if control == "recorded" else f"-{control}-{seed}")
    return Predicted(**filled(trace, name, {"order": ("<i2", shape), "score": ("<i4", shape)}, fill))


def _per_layer(trace: Trace, what: str, rule: Callable[[np.ndarray, np.ndarray | None], np.ndarray]) -> np.ndarray:
    """A rule over each layer's logits and correction bias."""

    def fill(arrays: Mapping[str, np.ndarray]) -> None:
        for first, last in _blocks(trace):
            logits = trace.read("logits", first, last)
            for layer in range(trace.geometry.layers):
                bias = None if trace.router_bias is None else trace.router_bias[layer]
                arrays["rows"][first:last, layer] = rule(logits[:, layer], bias)

    shape = (trace.tokens, trace.geometry.layers, trace.geometry.experts)
    return filled(trace, what, {"rows": ("<f4", shape)}, fill)["rows"]


def _blocks(trace: Trace) -> list[tuple[int, int]]:
    edges = [*range(0, trace.tokens, TOKENS_AT_ONCE), trace.tokens]
    return list(itertools.pairwise(edges))
