"""Rows of a long file by request: a request is given as soon as its last row has been read.

A long file is read twice. The first reading finds where every request ends, which nothing before it says, and what a
header needs. The second holds the rows of requests that have begun and not ended, and gives them by number: one request
where they stand one after the other, those that run side by side where they are mixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from moereplay.traces.schema import TraceError

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
        """The requests (N,) of the rows that come next."""
        numbers, back = np.unique(request[::-1], return_index=True)
        last = self.rows + len(request) - 1 - back
        self.last.update(zip(numbers.tolist(), last.tolist(), strict=True))
        self.rows += len(request)

    def renumbered(self, numbers: np.ndarray) -> None:
        """Request i is called `numbers[i]` from now on, several perhaps alike."""
        last: dict[int, int] = {}
        for request, row in self.last.items():
            number = int(numbers[request])
            last[number] = max(row, last.get(number, row))
        self.last = last


def by_request(pieces: Iterable[Columns], ends: Ends, place: str) -> Iterator[dict[str, np.ndarray]]:
    """All rows of one request after the other, by number. Raises TraceError if the file is not what it was before."""
    waiting: dict[int, list[Columns]] = {}
    due, read = sorted(ends.last, reverse=True), 0
    for columns in pieces:
        for number, part in _parts(columns):
            waiting.setdefault(number, []).append(part)
        read += len(columns[REQUEST])
        while due and ends.last[due[-1]] < read:
            yield _joined(waiting.pop(due.pop(), None), place)
    if due or waiting or read != ends.rows:
        raise TraceError(f"{place}: {CHANGED}")


def _parts(columns: Columns) -> Iterator[tuple[int, Columns]]:
    """The rows of each request, in the order of the rows; copies, so that none keeps the others in memory."""
    request = columns[REQUEST]
    if (request == request[0]).all():
        yield int(request[0]), columns
        return
    order = np.argsort(request, kind="stable")
    numbers, starts = np.unique(request[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        yield number, {name: values[rows] for name, values in columns.items()}


def _joined(parts: list[Columns] | None, place: str) -> dict[str, np.ndarray]:
    if not parts or any(part.keys() != parts[0].keys() for part in parts):
        raise TraceError(f"{place}: {CHANGED}")
    return joined(parts)


def in_groups(pieces: Iterable[Columns], k: int) -> Iterator[Columns]:
    """The same rows by whole groups of k that follow each other; the last piece may end inside a group."""
    left: list[Columns] = []
    for columns in pieces:
        together = joined([*left, columns])
        rows = len(next(iter(together.values())))
        whole = rows - rows % k
        left = [{name: values[whole:] for name, values in together.items()}]
        if whole:
            yield {name: values[:whole] for name, values in together.items()}
    if left and len(next(iter(left[0].values()))):
        yield left[0]


def joined(parts: list[Columns]) -> dict[str, np.ndarray]:
    """The rows of several parts with the same columns."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
