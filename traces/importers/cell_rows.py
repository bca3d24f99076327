"""Rows of sheets by what stands in their cells: requests of any name, lists of experts and of weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from traces.importers import mapping
from traces.importers.by_request import REQUEST
from traces.importers.cells import number, numbers, whole
from traces.importers.numbering import Restarts
from traces.importers.rows import PHASE, Rows
from traces.importers.sheet import Sheet
from traces.importers.table import COUNT, ids_below
from traces.schema import VALUES, TraceError, Values, shown

PHASES = {"prompt": 0, "prefill": 0, "decode": 1, "decoding": 1, "generated": 1, "generation": 1}


class CellRows:
    """Rows of one sheet of a file after the other, and what had to be assumed, known when all have been read."""

    def __init__(self, columns: mapping.Columns) -> None:
        self._columns = columns
        self._names: dict[str, int | None] = {}  #: of requests, in the order of their first rows; a number if it is one
        self._order: dict[str, int] = {}
        self._restarts = Restarts()
        self._lengths: set[int] = set()  #: of lists of experts
        self._misfits: dict[int, TraceError] = {}  #: of lists of weights that are no row's, by their length

    def rows(self, sheet: Sheet) -> Rows:
        """A row for each of the sheet's, requests in the order of their first rows, layers by the file's numbers."""
        columns = self._columns
        token = _whole(sheet, columns["token"][0], COUNT)
        layer = _whole(sheet, columns["layer"][0], COUNT)
        ids = self._experts(sheet)
        return Rows(
            sheet.file,
            sheet.first + np.arange(len(token)),
            self._requests(sheet, token, layer),
            token,
            layer,
            ids,
            weights=self._weights(sheet, ids) if "weights" in columns else None,
            phase=_phases(sheet, columns["phase"][0]) if "phase" in columns else None,
        )

    def check(self, k: int) -> None:
        """Raises TraceError naming a row whose weights are neither as many as its experts nor k."""
        for length, misfit in self._misfits.items():
            if length != k:
                raise misfit

    @property
    def numbers(self) -> np.ndarray | None:
        """Of each request, if all of them are called by whole numbers."""
        named = list(self._names.values())
        return None if not named or None in named else np.array(named, np.int64)

    def said(self, requests: int) -> list[str]:
        """What was assumed of so many requests."""
        if REQUEST in self._columns:
            return [] if self.numbers is not None else ["requests in the order of their first rows"]
        how = f"{requests:,} requests, a new one where the token falls back" if requests > 1 else "one request"
        return [f"no request column: {how}"]

    def width(self, k: int) -> str:
        """How many experts a row has."""
        return f"k = {k}{' from the widest row, -1 in the others' if len(self._lengths) > 1 else ''}"

    def _requests(self, sheet: Sheet, token: np.ndarray, layer: np.ndarray) -> np.ndarray:
        if REQUEST not in self._columns:
            return self._restarts.add(token, layer)
        cells = sheet.columns[self._columns[REQUEST][0]]
        names = [str(cell) for cell in cells]
        for name, cell in dict(zip(names, cells, strict=True)).items():
            if name not in self._names:
                self._order[name] = len(self._order)
                found = whole(cell)
                self._names[name] = found if found is not None and COUNT.least <= found <= COUNT.most else None
        return np.array([self._order[name] for name in names], np.int64)

    def _experts(self, sheet: Sheet) -> np.ndarray:
        """(N, k) of the sheet's widest row, -1 after a row's last one."""
        found = _lists(sheet, self._columns["experts"], ids_below(None))
        self._lengths.update(map(len, found))
        return _dense(found, max(map(len, found)), -1).astype(np.int64)

    def _weights(self, sheet: Sheet, ids: np.ndarray) -> np.ndarray:
        names = self._columns["weights"]
        found = _lists(sheet, names, VALUES["weights"])
        lengths, wanted = np.array(list(map(len, found))), (ids >= 0).sum(axis=1)
        for row in np.flatnonzero(lengths != wanted).tolist():
            wrong = f"{lengths[row]} {names[0]} for {wanted[row]} experts; expected as many"
            self._misfits.setdefault(int(lengths[row]), TraceError(f"{sheet.place(row)}: {wrong}"))
        return _dense(found, max(ids.shape[1], int(lengths.max())), 0)


def _whole(sheet: Sheet, column: str, allowed: Values) -> np.ndarray:
    found = [whole(cell) for cell in sheet.columns[column]]
    for row, value in enumerate(found):
        if value is None or not allowed.least <= value <= allowed.most:
            raise _misfit(sheet, row, column, sheet.columns[column][row], allowed.expected)
    return np.array(found, np.int64)


def _misfit(sheet: Sheet, row: int, column: str, cell: Any, expected: str) -> TraceError:
    spelled = shown(repr(cell) if isinstance(cell, str) else cell)
    return TraceError(f"{sheet.place(row)}: {column} is {spelled}; expected {expected}")


def _dense(found: Sequence[Sequence[float]], width: int, fill: float) -> np.ndarray:
    """(N, width) of lists, `fill` after the last of each."""
    lengths = np.array(list(map(len, found)))
    dense = np.full((len(found), width), float(fill))
    dense[np.arange(width) < lengths[:, None]] = np.concatenate(found)
    return dense


def _lists(sheet: Sheet, names: tuple[str, ...], allowed: Values) -> list[list[float]]:
    """The numbers of each row, in one cell or in several."""
    if len(names) == 1:
        cells = sheet.columns[names[0]]
    else:
        cells = [list(row) for row in zip(*(sheet.columns[name] for name in names), strict=True)]
    within = partial(_fits, allowed=allowed)
    lists = []
    for row, cell in enumerate(cells):
        found = numbers(cell)
        if not found or not all(map(within, found)):
            expected = f"numbers, each {allowed.expected}, as [3, 17], 3 17 or 3;17"
            raise _misfit(sheet, row, names[0], cell, expected)
        lists.append(found)
    return lists


def _fits(value: float, allowed: Values) -> bool:
    return allowed.least <= value <= allowed.most and ("f" in allowed.kinds or isinstance(value, int))


def _phases(sheet: Sheet, column: str) -> np.ndarray:
    found = [
        PHASES.get(cell.strip().lower(), number(cell)) if isinstance(cell, str) else number(cell)
        for cell in sheet.columns[column]
    ]
    for row, value in enumerate(found):
        if value not in (PHASE.least, PHASE.most):
            raise _misfit(sheet, row, column, sheet.columns[column][row], f"0, 1, {', '.join(PHASES)}")
    return np.array(found, np.int64)
