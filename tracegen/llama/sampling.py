"""Pick the next token from a row of logits, and compute the nll of given ones; in numpy, from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pick(logits: np.ndarray, temperature: float, top_p: float, top_k: int, draw: np.random.Generator) -> int:
    """Return a token from logits (V,): the likeliest at temperature 0, else one drawn within `top_k` and `top_p`."""
    if not temperature:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    scaled = logits[order].astype(np.float64) / temperature
    chances = np.exp(scaled - scaled[0])
    chances /= chances.sum()
    if top_p < 1:  # the fewest whose total reaches top_p
        kept = int(np.searchsorted(chances.cumsum(), top_p)) + 1
        order, chances = order[:kept], chances[:kept] / chances[:kept].sum()
    return int(order[min(int(np.searchsorted(chances.cumsum(), draw.random(), side="right")), len(order) - 1)])


def nll(last: np.ndarray | None, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Return (T,) f32 nats of tokens: the first from `last` (V,), 0 without one, the others from logits (T, V)."""
    found = np.zeros(len(tokens), np.float32)
    for at, token in enumerate(tokens):
        row = logits[at - 1] if at else last
        if row is not None:
            most = row.max()
            found[at] = np.log(np.exp((row - most).astype(np.float64)).sum()) + float(most) - float(row[token])
    return found
