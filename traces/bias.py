"""The correction bias that some routers add to scores to choose, and not to weigh: `router_bias`, (L, E) f32."""

from __future__ import annotations

import numpy as np

from moereplay.traces.schema import MOST_BIAS, Header, TraceError, Values, first_refused


def check_bias(bias: np.ndarray, where: str) -> None:
    """Raise TraceError unless a router's correction bias (L, E) is finite and small enough for scores in UNITs."""
    at = first_refused(bias, Values("f", -MOST_BIAS, MOST_BIAS))
    if at is not None:
        layer, expert = at
        raise TraceError(
            f"{where}: router_bias of layer {layer}, expert {expert} is {bias[at]}; "
            f"expected a number from -{MOST_BIAS} to {MOST_BIAS}"
        )


def checked_bias(bias: np.ndarray | None, header: Header) -> np.ndarray | None:
    """A router's correction bias as stored, (L, E) f32. Raises TraceError for another shape or range."""
    if bias is None:
        return None
    expected = (header.geometry.layers, header.geometry.experts)
    checked = np.ascontiguousarray(bias, "<f4")
    if checked.shape != expected or not np.isfinite(checked).all():
        raise TraceError(f"router_bias has shape {checked.shape}, expected finite numbers of shape {expected}")
    check_bias(checked, "this model")
    return checked


def same_bias(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two traces have equal biases, or none."""
    return one is other if one is None or other is None else np.array_equal(one, other)
