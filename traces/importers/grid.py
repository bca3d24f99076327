"""Long tables to dense rows: a line per (request, token, layer) becomes arrays with a token and a layer axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moereplay.traces.schema import TraceError


@dataclass(frozen=True)
class Grid:
    """One request's cells; a cell is (token, layer), or (token, layer, slot) flattened."""

    request: int
    first_token: int
    tokens: int
    width: int  #: cells per token
    rows: np.ndarray  #: which lines of the long table belong to the request
    cells: np.ndarray  #: (len(rows),) cell of each, distinct

    def dense(self, values: np.ndarray, fill: float) -> np.ndarray:
        """`values` of the long table as (T, width, ...); `fill` where no line gives one."""
        spread = np.full((self.tokens * self.width, *values.shape[1:]), fill, values.dtype)
        spread[self.cells] = values[self.rows]
        return spread.reshape(self.tokens, self.width, *values.shape[1:])


@dataclass(frozen=True)
class Keys:
    """Where each of N lines belongs, and where it came from."""

    request: np.ndarray
    token: np.ndarray
    cell: np.ndarray  #: layer, or layer and slot flattened: below `width`
    width: int
    lines: np.ndarray  #: line numbers
    place: str  #: the file, for messages


def grids(keys: Keys) -> Iterator[Grid]:
    """The requests by number. Raises TraceError on a repeated cell or a gap in the tokens."""
    order = np.argsort(keys.request, kind="stable")
    found, starts = np.unique(keys.request[order], return_index=True)
    for number, rows in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        tokens = np.unique(keys.token[rows])
        gaps = np.flatnonzero(np.diff(tokens) != 1)
        if len(gaps):
            jump = f"from token {tokens[gaps[0]]} to {tokens[gaps[0] + 1]}"
            raise TraceError(f"{keys.place}: request {number} jumps {jump}; expected consecutive tokens")
        cells = (keys.token[rows] - tokens[0]) * keys.width + keys.cell[rows]
        _refuse_repeats(cells, number, keys.place, keys.lines[rows])
        yield Grid(number, int(tokens[0]), len(tokens), keys.width, rows, cells)


def _refuse_repeats(cells: np.ndarray, request: int, place: str, lines: np.ndarray) -> None:
    order = np.argsort(cells, kind="stable")
    repeats = np.flatnonzero(np.diff(cells[order]) == 0)
    if len(repeats):
        first, second = lines[order[repeats[0]]], lines[order[repeats[0] + 1]]
        raise TraceError(f"{place} line {second}: repeats line {first} of request {request}; expected each cell once")


def prompt_of(phases: np.ndarray, request: int, place: str) -> int:
    """Prompt tokens from the phase (0 prompt, 1 decode) of each token (T,). Raises TraceError if not in this order."""
    back = np.flatnonzero(np.diff(phases) < 0)
    if len(back):
        where = f"request {request} returns to phase 0 after its token {back[0]}"
        raise TraceError(f"{place}: {where}; expected the prompt first, then decode")
    return int((phases == 0).sum())
