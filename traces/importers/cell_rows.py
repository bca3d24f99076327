"""Rows of sheets by what stands in their cells: requests of any name, lists of experts and of weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from moereplay.traces.importers import mapping
from moereplay.traces.importers.by_request import REQUEST
from moereplay.traces.importers.cells import number, numbers, whole
from moereplay.traces.importers.numbering import Restarts
from moereplay.traces.importers.rows import PHASE, Rows
from moereplay.traces.importers.sheet import Cells, Sheet
from moereplay.traces.importers.table import COUNT, ids_below
from moereplay.traces.schema import MOST_EXPERTS, VALUES, TraceError, Values, shown

LAYER_NUMBER = re.compile(r"(?:layers?|blocks?|blk|h)[._/]?(\d+)", re.ASCII | re.IGNORECASE)
LAYER_NAME = re.compile(r"[A-Za-z].*[./_\d]|[./_].*[A-Za-z]", re.ASCII)  #: as modules are named
NUMBER = re.compile(r"\d+", re.ASCII)
PHASES = {"prompt": 0, "prefill": 0, "decode": 1, "decoding": 1, "generated": 1, "generation": 1}


class CellRows:
    """Rows of one sheet of a file after the other, and what had to be assumed, known when all have been read."""

    def __init__(self, columns: mapping.Columns) -> None:
        self._columns = columns
        self._names: dict[str, int | None] = {}  #: of requests, in the order of their first rows; a number if it is one
        self._order: dict[str, int] = {}
        self._restarts = Restarts()
        self._layers = _Layers()
        self._lengths: set[int] = set()  #: of lists of experts
        self._misfits: dict[int, TraceError] = {}  #: of lists of weights that are no row's, by their length

    def rows(self, sheet: Sheet) -> Rows:
        """A row for each of the sheet's, requests in the order of their first rows, layers by the file's numbers."""
        columns = self._columns
        token = _whole(sheet, columns["token"][0], COUNT)
        layer = self._layers.numbers(sheet, columns["layer"][0])
        ids = self._experts(sheet)
        request = self._requests(sheet, token, layer)
        _refuse_crowd(sheet, request, token, layer)
        return Rows(
            sheet.file,
            np.asarray(sheet.numbers),
            request,
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
        """What was assumed of so many requests, and of layers that have names."""
        if REQUEST in self._columns:
            return ["requests in the order of their first rows"] * (self.numbers is None) + self._layers.said()
        how = f"{requests:,} requests, a new one where the token falls back" if requests > 1 else "one request"
        return [f"no request column: {how}", *self._layers.said()]

    def width(self, k: int) -> str:
        """How many experts a row has."""
        return f"k = {k}{' from the widest row, -1 in the others' if len(self._lengths) > 1 else ''}"

    def _requests(self, sheet: Sheet, token: np.ndarray, layer: np.ndarray) -> np.ndarray:
        if REQUEST not in self._columns:
            return self._restarts.add(token, layer)
        cells = sheet.columns[self._columns[REQUEST][0]]
        if isinstance(cells, np.ndarray):
            found, first, row = np.unique(cells, return_index=True, return_inverse=True)
            self._number(found[np.argsort(first)].tolist())
            return np.array([self._order[str(cell)] for cell in found.tolist()], np.int64)[row]
        self._number(list(dict.fromkeys(cells)) if all(isinstance(cell, str) for cell in cells) else cells)
        return np.array([self._order[str(cell)] for cell in cells], np.int64)

    def _number(self, cells: list[Any]) -> None:
        """Give numbers to requests that were not seen before."""
        for cell in cells:
            name = str(cell)
            if name not in self._names:
                self._order[name] = len(self._order)
                found = whole(cell)
                self._names[name] = found if found is not None and COUNT.least <= found <= COUNT.most else None

    def _experts(self, sheet: Sheet) -> np.ndarray:
        """(N, k) of the sheet's widest row, -1 after a row's last one."""
        allowed = ids_below(None)
        dense = _array(sheet, self._columns["experts"], allowed)
        if dense is not None:
            self._lengths.add(dense.shape[1])
            return dense.astype(np.int64)
        found = _lists(sheet, self._columns["experts"], allowed)
        self._lengths.update(map(len, found))
        return _dense(found, max(map(len, found)), -1).astype(np.int64)

    def _weights(self, sheet: Sheet, ids: np.ndarray) -> np.ndarray:
        names = self._columns["weights"]
        dense = _array(sheet, names, VALUES["weights"])
        if dense is not None and dense.shape == ids.shape and (ids >= 0).all():
            return dense.astype(np.float64)
        found = _lists(sheet, names, VALUES["weights"])
        lengths, wanted = np.array(list(map(len, found))), (ids >= 0).sum(axis=1)
        for row in np.flatnonzero(lengths != wanted).tolist():
            wrong = f"{lengths[row]} {names[0]} for {wanted[row]} experts; expected as many"
            self._misfits.setdefault(int(lengths[row]), TraceError(f"{sheet.place(row)}: {wrong}"))
        return _dense(found, max(ids.shape[1], int(lengths.max())), 0)


class _Layers:
    """Numbers of layers: as written, those in their names (`/model/layers.3/moe`), or in the order of first use."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  #: in the order of first use

    def numbers(self, sheet: Sheet, column: str) -> np.ndarray:
        """(N,) of a sheet's rows. Raises TraceError for what is neither a number nor a name as those before."""
        cells = sheet.columns[column]
        named = [cell for cell in dict.fromkeys(cells) if _is_name(cell)] if isinstance(cells, list) else []
        if not named and not self._names:
            return _whole(sheet, column, COUNT)
        for row, cell in enumerate(cells):
            if not _is_name(cell):
                raise _misfit(sheet, row, column, cell, "the name of a layer, as in other rows")
        for name in named:
            self._names.setdefault(name, _in_name(name))
        by_number = len(set(self._names.values())) == len(self._names) and -1 not in self._names.values()
        order = self._names if by_number else {name: at for at, name in enumerate(self._names)}
        if self.by_number is not None and self.by_number != by_number:
            raise TraceError(f"{sheet.place(0)}: {column} names layers without a number of their own; number them")
        self.by_number = by_number
        return np.array([order[cell] for cell in cells], np.int64)

    by_number: bool | None = None  #: None while no layer has a name

    def said(self) -> list[str]:
        """What was assumed of layers that have names."""
        how = "the numbers in their names" if self.by_number else "the order of first use"
        return [f"layers by {how}"] if self._names else []


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and bool(LAYER_NAME.search(cell)) and number(cell) is None


def _in_name(name: str) -> int:
    """The number of a layer's name, -1 if it has none or several."""
    found = LAYER_NUMBER.findall(name) or NUMBER.findall(name)
    return int(found[0]) if len(found) == 1 and len(found[0]) < 6 else -1


def _refuse_crowd(sheet: Sheet, request: np.ndarray, token: np.ndarray, layer: np.ndarray) -> None:
    """Raises TraceError for a token at a layer with more rows in a row than a layer has experts."""
    if len(token) <= MOST_EXPERTS:
        return
    same = (np.diff(token) == 0) & (np.diff(layer) == 0) & (np.diff(request) == 0)
    edges = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
    at = int(np.argmax(np.diff(edges)))
    if edges[at + 1] - edges[at] > MOST_EXPERTS:
        wrong = f"more than {MOST_EXPERTS:,} rows of token {token[edges[at]]} at layer {layer[edges[at]]}"
        raise TraceError(f"{sheet.place(int(edges[at]))}: {wrong}; expected each expert once")


def _array(sheet: Sheet, names: tuple[str, ...], allowed: Values) -> np.ndarray | None:
    """(N, k) of columns that are arrays of numbers, None of others. Raises TraceError for a number out of range."""
    cells = [each for name in names if isinstance(each := sheet.columns[name], np.ndarray)]
    if len(cells) < len(names) or (len(names) > 1 and any(each.ndim > 1 for each in cells)):
        return None
    found = cells[0] if cells[0].ndim > 1 else np.stack(cells, 1)
    wrong = np.argwhere(~_allowed(found, allowed))
    if len(wrong):
        row, rank = wrong[0].tolist()
        expected = f"numbers, each {allowed.expected}"
        raise _misfit(sheet, row, names[rank if len(names) > 1 else 0], found[row, rank], expected)
    return found


def _allowed(found: np.ndarray, allowed: Values) -> np.ndarray:
    fine = (found >= allowed.least) & (found <= allowed.most)
    return fine if found.dtype.kind in "iu" or "f" in allowed.kinds else fine & (np.rint(found) == found)


def _whole(sheet: Sheet, column: str, allowed: Values) -> np.ndarray:
    cells = sheet.columns[column]
    if isinstance(cells, np.ndarray) and cells.ndim == 1:
        wrong = np.flatnonzero(~_allowed(cells, allowed))
        if len(wrong):
            raise _misfit(sheet, int(wrong[0]), column, cells[wrong[0]], allowed.expected)
        return cells.astype(np.int64)
    found = [whole(cell) for cell in cells]
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
        cells = _listed(sheet.columns[names[0]])
    else:
        cells = [list(row) for row in zip(*(_listed(sheet.columns[name]) for name in names), strict=True)]
    within = partial(_fits, allowed=allowed)
    lists = []
    for row, cell in enumerate(cells):
        found = numbers(cell)
        if not found or not all(map(within, found)):
            expected = f"numbers, each {allowed.expected}, as [3, 17], 3 17 or 3;17"
            raise _misfit(sheet, row, names[0], cell, expected)
        lists.append(found)
    return lists


def _listed(cells: Cells) -> list[Any]:
    return cells.tolist() if isinstance(cells, np.ndarray) else cells


def _fits(value: float, allowed: Values) -> bool:
    return allowed.least <= value <= allowed.most and ("f" in allowed.kinds or isinstance(value, int))


def _phases(sheet: Sheet, column: str) -> np.ndarray:
    found = [
        PHASES.get(cell.strip().lower(), number(cell)) if isinstance(cell, str) else number(cell)
        for cell in _listed(sheet.columns[column])
    ]
    for row, value in enumerate(found):
        if value not in (PHASE.least, PHASE.most):
            raise _misfit(sheet, row, column, sheet.columns[column][row], f"0, 1, {', '.join(PHASES)}")
    return np.array(found, np.int64)
