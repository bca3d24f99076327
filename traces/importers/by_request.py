"""Group rows into requests: find where each begins and ends, its layers and tokens, and build its dense arrays.

A long file is read twice. The first pass finds the end of every request and the facts that the
header needs. The second keeps only the rows of open requests and yields requests by number: one
at a time if they are consecutive, several at a time if their rows are interleaved. Memory is bounded by the
requests that are open at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from moereplay.traces.schema import MOST_LAYERS, TraceError

Columns = Mapping[str, np.ndarray]
"""Some rows (N,) or (N, width) by name, their requests (N,) under `REQUEST`."""
REQUEST = "request"
CHANGED = "it was changed while it was read; import it again"


class Ends:
    """The row with which every request ends, counted from the start of the file."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.rows = 0

    def add(self, request: np.ndarray) -> None:
        """Add the requests (N,) of the next rows."""
        numbers, back = np.unique(request[::-1], return_index=True)
        last = self.rows + len(request) - 1 - back
        self.last.update(zip(numbers.tolist(), last.tolist(), strict=True))
        self.rows += len(request)

    def renumbered(self, numbers: np.ndarray) -> None:
        """Rename request i to `numbers[i]`; several requests may get the same number."""
        last: dict[int, int] = {}
        for request, row in self.last.items():
            number = int(numbers[request])
            last[number] = max(row, last.get(number, row))
        self.last = last


def by_request(pieces: Iterable[Columns], ends: Ends, place: str) -> Iterator[dict[str, np.ndarray]]:
    """Yield all rows of one request after the other, by number. Raises TraceError if the file has changed."""
    waiting: dict[int, list[Columns]] = {}
    due, read = sorted(ends.last, reverse=True), 0
    for columns in pieces:
        for number, rows in _rows_of_each(columns[REQUEST]):
            part = columns if isinstance(rows, slice) else {name: values[rows] for name, values in columns.items()}
            waiting.setdefault(number, []).append(part)  # a copy, so that none keeps the others in memory
        read += len(columns[REQUEST])
        while due and ends.last[due[-1]] < read:
            parts = waiting.pop(due.pop(), [])
            if not parts or any(part.keys() != parts[0].keys() for part in parts):
                raise TraceError(f"{place}: {CHANGED}")
            yield joined(parts)
    if due or waiting or read != ends.rows:
        raise TraceError(f"{place}: {CHANGED}")


def joined(parts: list[Columns]) -> dict[str, np.ndarray]:
    """Return the rows of several parts with the same columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# ---------------------------------------------------------------- dense arrays: a token and a layer axis


@dataclass(frozen=True)
class Grid:
    """One request's cells; a cell is (token, layer), or (token, layer, slot) flattened."""

    request: int
    first_token: int
    tokens: int
    width: int  #: cells per token
    rows: np.ndarray | slice  #: which lines of the long table belong to the request; a slice if all of them do
    cells: np.ndarray  #: (N,) cell of each of these, distinct

    def dense(self, values: np.ndarray, fill: float) -> np.ndarray:
        """Return `values` of the long table as (T, width, ...); `fill` where no line gives one."""
        spread = np.full((self.tokens * self.width, *values.shape[1:]), fill, values.dtype)
        spread[self.cells] = values[self.rows]
        return spread.reshape(self.tokens, self.width, *values.shape[1:])


@dataclass(frozen=True)
class Keys:
    """Request, token and cell of each of N lines, and the line's number."""

    request: np.ndarray
    token: np.ndarray
    cell: np.ndarray  #: layer, or layer and slot flattened: below `width`
    width: int
    lines: np.ndarray  #: line numbers
    place: str  #: the file, for messages


def grids(keys: Keys) -> Iterator[Grid]:
    """Yield the requests by number. Raises TraceError on a repeated cell or a gap in the tokens."""
    for number, rows in _rows_of_each(keys.request):
        tokens = distinct(keys.token[rows])
        gaps = np.flatnonzero(np.diff(tokens) != 1)
        if len(gaps):
            jump = f"from token {tokens[gaps[0]]} to {tokens[gaps[0] + 1]}"
            raise TraceError(f"{keys.place}: request {number} jumps {jump}: expected consecutive tokens")
        cells = (keys.token[rows].astype(np.int64) - int(tokens[0])) * keys.width + keys.cell[rows]
        _refuse_repeats(cells, number, keys.place, keys.lines[rows])
        yield Grid(number, int(tokens[0]), len(tokens), keys.width, rows, cells)


def _rows_of_each(request: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice]]:
    """Yield each number and its rows, in the order of the rows. A single request needs no index of 8 bytes a row."""
    if len(request) and (request == request[0]).all():
        yield int(request[0]), slice(None)
        return
    order = np.argsort(request, kind="stable")
    found, starts = np.unique(request[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]), strict=True)


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct numbers of (N,), ascending. Most files are sorted already, which is fast."""
    return values if (values[1:] > values[:-1]).all() else np.unique(values, return_index=True)[0]


def _refuse_repeats(cells: np.ndarray, request: int, place: str, lines: np.ndarray) -> None:
    if (cells[1:] > cells[:-1]).all():
        return
    order = np.argsort(cells, kind="stable")
    repeats = np.flatnonzero(np.diff(cells[order]) == 0)
    if len(repeats):
        first, second = lines[order[repeats[0]]], lines[order[repeats[0] + 1]]
        raise TraceError(
            f"{place} line {second}: repeats line {first} of request {request}: expected each token and layer once"
        )


def prompt_of(phases: np.ndarray, request: int, place: str) -> int:
    """Return prompt tokens from the phase (0 prompt, 1 decode) of each token (T,).

    Raises TraceError if not in this order.
    """
    back = np.flatnonzero(np.diff(phases) < 0)
    if len(back):
        where = f"request {request} returns to phase 0 after its token {back[0]}"
        raise TraceError(f"{place}: {where}: expected the prompt first, then decode steps")
    return int((phases == 0).sum())


# ---------------------------------------------------------------- numbers that recorders leave out


def moe_layers(found: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return MoE layers (N,) numbered from 0 in the order of the model's numbers (N,), and a note if they differ."""
    numbers, layer = np.unique(found, return_inverse=True)
    return layer, renumbering(numbers)


def renumbering(numbers: np.ndarray) -> list[str]:
    """Return a note if the model's own numbers of its MoE layers (L,), rising, are not 0 and on."""
    count = len(numbers)
    if count > MOST_LAYERS:
        raise TraceError(f"{count:,} layers: expected at most {MOST_LAYERS:,}; the layer may be in another column")
    if numbers[-1] == count - 1:
        return []
    listed = ", ".join(map(str, numbers[:4].tolist())) + (f", ... {numbers[-1]}" if count > 4 else "")
    listed = f"{numbers[0]}..{numbers[-1]}" if numbers[-1] - numbers[0] == count - 1 else listed
    return [f"layers {listed} of the file are MoE layers 0..{count - 1}"]


class Restarts:
    """`restarts` of a file that is read some rows at a time."""

    def __init__(self, repeats: bool = False) -> None:
        self._repeats = repeats
        self._last: dict[int, tuple[int, int]] = {}  #: token and restarts of the last row, by stream

    def add(self, token: np.ndarray, stream: np.ndarray) -> np.ndarray:
        """Return how often the token has fallen back before each of the next rows (N,) of the stream."""
        streams, first, row = np.unique(stream, return_index=True, return_inverse=True)
        before = []
        for number, at in zip(streams.tolist(), token[first].tolist(), strict=True):
            previous, fallen = self._last.get(number, (at - 1, 0))
            before.append(fallen + (at <= previous if self._repeats else at < previous))
        request = restarts(token, stream, self._repeats) + np.array(before)[row]
        last = len(stream) - 1 - np.unique(stream[::-1], return_index=True)[1]
        ended = zip(token[last].tolist(), request[last].tolist(), strict=True)
        self._last.update(zip(streams.tolist(), ended, strict=True))
        return request


def restarts(token: np.ndarray, stream: np.ndarray, repeats: bool = False) -> np.ndarray:
    """Return how often the token has fallen back before each row (N,) of the same `stream`, such as a layer.

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
