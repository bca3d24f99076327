"""A trace in memory, from numpy arrays of routing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moereplay.traces.bias import checked_bias
from moereplay.traces.geometry import known
from moereplay.traces.schema import Geometry, Header, Provenance, Request, Trace, TraceError, memory_trace


def from_arrays(
    chosen: np.ndarray,
    geometry: Geometry | str,
    *,
    lengths: Sequence[int] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    weights: np.ndarray | None = None,
    logits: np.ndarray | None = None,
    lookahead: Sequence[np.ndarray] = (),
    router_bias: np.ndarray | None = None,
) -> Trace:
    """A trace held in memory. T tokens of all requests, L MoE layers, E experts per layer, k of them per token.

    chosen          (T, L, k) whole numbers: experts of each token and layer, the best first; -1 for none
    geometry        sizes and router: a `Geometry`, or the name of a known model (`moereplay models`)
    lengths         tokens of each request; they add up to T; default one request
    prompt_lengths  tokens of each request that are its prompt, and go through the model in one pass; default 0
    weights         (T, L, k) gate weights of the chosen
    logits          (T, L, E) router logits, before any bias or softmax
    lookahead       lookahead[d - 1] is (T, L, E): logits of layer l + d as predicted at layer l
    router_bias     (L, E) bias that is added to scores to choose, and not to weigh

    Raises TraceError naming the array and the shape expected, or the number that no trace may hold.
    """
    ids = np.asarray(chosen)
    if ids.ndim != 3:
        raise TraceError(f"chosen has shape {ids.shape}; expected (tokens, layers, k)")
    header = _header(geometry, ids.shape[2], len(lookahead))
    optional = {"weights": weights, "logits": logits}
    rows = {name: np.asarray(array) for name, array in optional.items() if array is not None}
    looks = tuple(np.asarray(look) for look in lookahead)
    lengths = [len(ids)] if lengths is None else lengths
    prompts = [0] * len(lengths) if prompt_lengths is None else prompt_lengths
    _check_lengths(
        lengths, prompts, {"chosen": ids, **rows, **{f"lookahead[{d}]": look for d, look in enumerate(looks)}}
    )
    ends = np.cumsum(lengths).tolist()
    requests = [
        Request(ids[a:b], prompt, lookahead=tuple(look[a:b] for look in looks), **{n: r[a:b] for n, r in rows.items()})
        for a, b, prompt in zip([0, *ends], ends, prompts, strict=False)
    ]
    bias = None if router_bias is None else np.asarray(router_bias)
    return memory_trace(header, requests, checked_bias(bias, header))


def _header(geometry: Geometry | str, k: int, depth: int) -> Header:
    """Sizes of the trace; k is that of the arrays, as a known model may have been run with another one."""
    if isinstance(geometry, Geometry):
        return Header(geometry=geometry, lookahead_depth=depth)
    model = known(geometry)
    sizes = model.geometry.model_copy(update={"k": k})
    return Header(geometry=sizes, provenance=Provenance(model=model.name), lookahead_depth=depth)


def _check_lengths(lengths: Sequence[int], prompts: Sequence[int], arrays: dict[str, np.ndarray]) -> None:
    for name, rows in arrays.items():
        if len(rows) != sum(lengths):
            raise TraceError(f"{name} has {len(rows)} tokens; the lengths of requests add up to {sum(lengths)}")
    if len(prompts) != len(lengths):
        raise TraceError(f"prompt_lengths has {len(prompts)} numbers for {len(lengths)} requests")
    for request, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        if length < 1:
            raise TraceError(f"request {request}: {length} tokens; a request needs at least one")
        if not 0 <= prompt <= length:
            raise TraceError(f"request {request}: {prompt} prompt tokens of {length}; expected 0 to {length}")
