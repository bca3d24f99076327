"""A part of a trace: its first layers, and some tokens of its first request."""

from __future__ import annotations

import numpy as np

from moereplay.simulator.errors import ConfigError
from moereplay.traces.dense import resolved
from moereplay.traces.schema import Geometry, Request, Trace, memory_trace

PER_LAYER = ("weights", "logits", "residency")
PER_TOKEN = ("token_ids", "nll")


def tokens_of(trace: Trace, layers: int | None, first: int, last: int, prompt: int = 0) -> Trace:
    """Tokens [first, last) of request 0 as a request, its first `prompt` in one pass, at the first `layers`.

    Raises ConfigError for more than there is.
    """
    request = trace.request(0)
    here, most = len(request.chosen), trace.geometry.layers
    if last > here:
        raise ConfigError(f"the first request of the trace has {here} tokens, not {last}; take fewer --tokens")
    if layers is not None and layers > most:
        raise ConfigError(f"--layers {layers}: the trace has {most}; take at most that")
    kept = most if layers is None else layers
    others = {name: _cut(getattr(request, name), first, last, kept) for name in (*PER_LAYER, *PER_TOKEN)}
    chosen = request.chosen[first:last, :kept]
    look = tuple(each[first:last, :kept] for each in request.lookahead)
    header = trace.header.model_copy(update={"geometry": shallow(trace.geometry, kept)})
    bias = None if trace.router_bias is None else trace.router_bias[:kept]
    return memory_trace(header, [Request(chosen, prompt, lookahead=look, **others)], bias)


def _cut(rows: np.ndarray | None, first: int, last: int, layers: int) -> np.ndarray | None:
    """Rows (T, ...) or (T, L, ...) of these tokens and layers."""
    if rows is None or rows.ndim == 1:
        return rows if rows is None else rows[first:last]
    return rows[first:last, :layers]


def shallow(geometry: Geometry, layers: int) -> Geometry:
    """The geometry of the first layers."""
    others = {bits: sizes[:layers] for bits, sizes in geometry.bytes_by_bits.items()}
    cut = {"layers": layers, "expert_bytes": geometry.expert_bytes[:layers], "bytes_by_bits": others}
    if (whole := resolved(geometry, "")).head_bytes is not None:
        cut |= {"dense_layer_bytes": whole.dense_layer_bytes[:layers], "head_bytes": whole.head_bytes, "dense_bytes": 0}
    return geometry.model_copy(update=cut)
