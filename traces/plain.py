"""Token arrays as plain memory-mapped files, which a compiled replay reads at random.

Compressed chunks are for keeping; these are made once beside the trace (`traces/derived.py`), a block at a time, so
that a trace may be larger than memory. A trace in memory gives its own arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from moereplay.traces import routers
from moereplay.traces.blocks import token_blocks
from moereplay.traces.derived import derived
from moereplay.traces.growing import Growing, Rows, append
from moereplay.traces.schema import Trace, dtype_of, row_shape


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
