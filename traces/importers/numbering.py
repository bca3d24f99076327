"""Numbers that recorders leave out: MoE layers from 0 on, and where a request begins if nothing says it."""

from __future__ import annotations

import numpy as np

from traces.schema import MOST_LAYERS, TraceError


def moe_layers(found: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """MoE layers (N,) from 0 on, in the order of the model's own numbers (N,), and what to say if they differ."""
    numbers, layer = np.unique(found, return_inverse=True)
    count = len(numbers)
    if count > MOST_LAYERS:
        raise TraceError(f"{count:,} layers; expected at most {MOST_LAYERS:,}: is the layer another column?")
    if numbers[-1] == count - 1:
        return layer, []
    listed = f"{numbers[0]}..{numbers[-1]}" if numbers[-1] - numbers[0] == count - 1 else _listed(numbers)
    return layer, [f"layers {listed} of the file are MoE layers 0..{count - 1}"]


def _listed(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:4].tolist())) + (f", ... {numbers[-1]}" if len(numbers) > 4 else "")


def restarts(token: np.ndarray, stream: np.ndarray, repeats: bool = False) -> np.ndarray:
    """How often the token has fallen back before each row (N,), within rows of the same `stream`, such as a layer.

    Rows may go token by token or layer by layer. `repeats`: an equal token is a restart as well.
    """
    order = np.argsort(stream, kind="stable")
    same, step = np.diff(stream[order]) == 0, np.diff(token[order])
    falls = np.concatenate([[0], np.cumsum(same & (step <= 0 if repeats else step < 0))])
    starts = np.concatenate([[True], ~same])
    before = falls[starts][np.cumsum(starts) - 1]
    request = np.empty_like(falls)
    request[order] = falls - before
    return request
