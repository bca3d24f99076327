"""What placements go by: how often each expert was used, or a ranking of the user's; and how a model numbers layers."""

from __future__ import annotations

import numpy as np

from moereplay.traces.exporters.contract import Options
from moereplay.traces.geometry import known
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.summary import uses


def scores(trace: Trace, options: Options) -> np.ndarray:
    """(L, E) int64, more is better to hold. Raises TraceError for a ranking of experts that the model does not have."""
    if not options.ranking:
        return uses(trace)
    layers, experts = trace.geometry.layers, trace.geometry.experts
    found = np.zeros((layers, experts), np.int64)
    for place, (layer, expert) in enumerate(options.ranking):
        if not (0 <= layer < layers and 0 <= expert < experts):
            fix = f"the trace has {layers} layers of {experts} experts"
            raise TraceError(f"--profile: [{layer}, {expert}] is no expert; {fix}")
        found[layer, expert] = max(found[layer, expert], len(options.ranking) - place)
    return found


def dense_layers(trace: Trace, options: Options) -> tuple[int, tuple[str, ...]]:
    """Layers without experts before the first one with them, and what is said where nobody gave their number."""
    if options.dense_layers is not None:
        return options.dense_layers, ()
    try:
        model = known(trace.header.provenance.model)
    except TraceError:
        return 0, ("assumed: every layer of the model has experts; --dense-layers N if its first N have none",)
    first = (
        f"its first {model.dense_layers} layers have no experts" if model.dense_layers else "every layer has experts"
    )
    return model.dense_layers, (f"{model.name}: {first}",)
