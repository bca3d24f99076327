"""Rows of one request as a running model reports them, a token at a layer at a time, in any order.

What is said of a token at a layer last counts: tokens of a rejected draft are said again, and so are those of a request
that was preempted and computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from moereplay.traces.schema import Geometry, Request, TraceError, check_values, dtype_of, row_shape

FIRST_ROWS = 64
NOT_ROUTED = -1


class Gathering:
    """One request, not complete yet. Arrays have a row per token, in the order in which tokens were first said."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._row: dict[int, int] = {}  #: of each token
        self._said = np.zeros((FIRST_ROWS, geometry.layers), bool)
        self._arrays: dict[str, np.ndarray] = {}

    def put(self, token: int, layer: int, values: Mapping[str, np.ndarray]) -> None:
        """`values` by array: chosen (at most k,), and for every row or for none weights (as many) and logits (E,).

        Raises TraceError naming what does not fit.
        """
        self._check_place(token, layer)
        rows = {name: self._checked(name, given) for name, given in values.items()}
        if not self._arrays:
            self._arrays = {name: self._empty(name, FIRST_ROWS) for name in rows}
        if rows.keys() != self._arrays.keys():
            differing = ", ".join(sorted(rows.keys() ^ self._arrays.keys()))
            raise TraceError(f"{differing} of token {token} at layer {layer}: give it for every row or for none")
        row = self._row.setdefault(token, len(self._row))
        self._grow(row)
        for name, given in rows.items():
            self._arrays[name][row, layer] = given
        self._said[row, layer] = True

    def request(self, prompt_length: int = 0, tokens: int | None = None) -> Request:
        """The first `tokens` of it, or all. Raises TraceError naming a token or a layer that was never said."""
        order = sorted(self._row)[:tokens]
        if not order:
            raise TraceError("no token of it was recorded")
        if order[-1] - order[0] != len(order) - 1:
            missing = next(token for token, after in pairwise(order) if after != token + 1) + 1
            raise TraceError(f"token {missing} is missing between {order[0]} and {order[-1]}; record every token")
        rows = np.array([self._row[token] for token in order])
        self._refuse_silent_layers(order, rows)
        kept = {name: array[rows] for name, array in self._arrays.items()}
        return Request(kept["chosen"], prompt_length, kept.get("weights"), kept.get("logits"))

    def complete_tokens(self) -> int:
        """Tokens without those at the end that lack a layer, as where a server was stopped."""
        order = sorted(self._row)
        while order and not self._said[self._row[order[-1]]].all():
            order.pop()
        return len(order)

    def _check_place(self, token: int, layer: int) -> None:
        if not 0 <= layer < self._geometry.layers:
            raise TraceError(f"layer {layer}; expected 0 to {self._geometry.layers - 1}, MoE layers only")
        if token < 0:
            raise TraceError(f"token {token}; expected its position in the request, from 0 on")

    def _checked(self, name: str, given: np.ndarray) -> np.ndarray:
        """A row as it is stored, shorter lists of experts filled with -1."""
        (width,) = row_shape(name, self._geometry)[1:]
        check_values(given, name, name)
        if given.ndim != 1 or not 0 < len(given) <= width or (name == "logits" and len(given) < width):
            raise TraceError(f"{name} has shape {given.shape}; expected ({width},)")
        row = np.full(width, _fill(name), dtype_of(name))
        row[: len(given)] = given
        return row

    def _empty(self, name: str, rows: int) -> np.ndarray:
        return np.full((rows, *row_shape(name, self._geometry)), _fill(name), dtype_of(name))

    def _grow(self, row: int) -> None:
        if row < len(self._said):
            return
        self._said = np.concatenate([self._said, np.zeros_like(self._said)])
        self._arrays = {
            name: np.concatenate([array, self._empty(name, len(array))]) for name, array in self._arrays.items()
        }

    def _refuse_silent_layers(self, order: list[int], rows: np.ndarray) -> None:
        silent = np.argwhere(~self._said[rows])
        if len(silent):
            at, layer = silent[0]
            raise TraceError(f"token {order[at]} has no row at layer {layer}; record every MoE layer of every token")


def _fill(name: str) -> int:
    return NOT_ROUTED if name == "chosen" else 0
