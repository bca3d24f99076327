"""Rows of tables by their cells: requests of any name, lists of experts and of weights; or exactly as documented."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import REQUEST, Restarts
from moereplay.traces.importers.rows import FLOATS, LISTS, PHASE, Rows, fits
from moereplay.traces.importers.table import COUNT, LAYER, Cells, Names, Table, ids_below, is_allowed
from moereplay.traces.importers.text import number, numbers, whole
from moereplay.traces.schema import MOST_EXPERTS, VALUES, TraceError, Values

LAYER_NUMBER = re.compile(r"(?:layers?|blocks?|blk|h)[._/]?(\d+)", re.ASCII | re.IGNORECASE)
LAYER_NAME = re.compile(r"[A-Za-z].*[./_\d]|[./_].*[A-Za-z]", re.ASCII)  #: as modules are named
NUMBER = re.compile(r"\d+", re.ASCII)
PLAIN_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
PLAIN_LIST = rf"^(?:\[{PLAIN_NUMBER}(?:, ?{PLAIN_NUMBER})*\]|{PLAIN_NUMBER}(?:[ ;,]{PLAIN_NUMBER})*)$"
MOST_NAME = 1_000  #: characters of a layer's name: the search for one takes the square of its length
PHASES = {"prompt": 0, "prefill": 0, "decode": 1, "decoding": 1, "generated": 1, "generation": 1}


class CellRows:
    """Rows of a file, one table after the other, and what had to be assumed, known when all have been read."""

    def __init__(self, columns: Names) -> None:
        self._columns = columns
        self._names: dict[str, int | None] = {}  #: of requests, in the order of their first rows; a number if it is one
        self._order: dict[str, int] = {}
        self._restarts = Restarts()
        self._layers = _Layers()
        self._lengths: set[int] = set()  #: of lists of experts
        self._misfits: dict[int, TraceError] = {}  #: of lists of weights that match no row, by their length

    def rows(self, table: Table) -> Rows:
        """Return a row for each of the table's: requests in order of first rows, layers by the file's numbers."""
        columns = self._columns
        token = table.checked(COUNT, columns["token"][0])
        layer = self._layers.numbers(table, columns["layer"][0])
        ids = self._experts(table)
        request = self._requests(table, token, layer)
        _refuse_crowd(table, request, token, layer)
        return Rows(
            table.file,
            table.lines,
            request,
            token,
            layer,
            ids,
            weights=self._weights(table, ids) if "weights" in columns else None,
            phase=_phases(table, columns["phase"][0]) if "phase" in columns else None,
        )

    def check(self, k: int) -> None:
        """Raises TraceError naming a row whose number of weights is neither that of its experts nor k."""
        for length, misfit in self._misfits.items():
            if length != k:
                raise misfit

    @property
    def numbers(self) -> np.ndarray | None:
        """Number of each request, None unless every request is named by a whole number."""
        named = list(self._names.values())
        return None if not named or None in named else np.array(named, np.int64)

    def said(self, requests: int) -> list[str]:
        """Describe the assumptions about this number of requests and about named layers."""
        if REQUEST in self._columns:
            return ["requests in the order of their first rows"] * (self.numbers is None) + self._layers.said()
        how = f"{requests:,} requests, a new one where the token falls back" if requests > 1 else "one request"
        return [f"no request column: {how}", *self._layers.said()]

    def width(self, k: int) -> str:
        """Describe how many experts a row has."""
        return f"k = {k}{' from the widest row, -1 in the others' if len(self._lengths) > 1 else ''}"

    def _requests(self, table: Table, token: np.ndarray, layer: np.ndarray) -> np.ndarray:
        if REQUEST not in self._columns:
            return self._restarts.add(token, layer)
        cells = table.columns[self._columns[REQUEST][0]]
        if isinstance(cells, np.ndarray):
            if cells.dtype.kind == "f" and (np.rint(cells) == cells).all():
                cells = cells.astype(np.int64)
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

    def _experts(self, table: Table) -> np.ndarray:
        """Return (N, k) of the table's widest row, -1 after a row's last one."""
        allowed = ids_below(None)
        dense = _array(table, self._columns["experts"], allowed)
        if dense is not None:
            self._lengths.add(dense.shape[1])
            return dense.astype(np.int64)
        found = _lists(table, self._columns["experts"], allowed)
        self._lengths.update(map(len, found))
        return _dense(found, max(map(len, found)), -1).astype(np.int64)

    def _weights(self, table: Table, ids: np.ndarray) -> np.ndarray:
        names = self._columns["weights"]
        dense = _array(table, names, VALUES["weights"])
        if dense is not None and dense.shape == ids.shape and (ids >= 0).all():
            return dense.astype(np.float64)
        found = _lists(table, names, VALUES["weights"])
        lengths, wanted = np.array(list(map(len, found))), (ids >= 0).sum(axis=1)
        for row in np.flatnonzero(lengths != wanted).tolist():
            wrong = f"{lengths[row]} {names[0]} for {wanted[row]} experts: expected the same number"
            self._misfits.setdefault(int(lengths[row]), TraceError(f"{table.place(row)}: {wrong}"))
        return _dense(found, max(ids.shape[1], int(lengths.max())), 0)


class ExactRows:
    """Rows of the plain formats: whole numbers and lists as documented, each list as long as in the first row."""

    def __init__(self, columns: Names, experts: int | None) -> None:
        self._columns = columns
        self._lengths: dict[str, int] = {}
        self._allowed = {"request": COUNT, "token": COUNT, "layer": LAYER, "phase": PHASE}
        self._allowed |= {"experts": ids_below(experts), **{name: VALUES[name] for name in FLOATS}}

    def rows(self, table: Table) -> Rows:
        """Return a row for each of the table's. Raises TraceError naming the row that is wrong."""
        return Rows(table.file, table.lines, **{field: self._values(table, field) for field in self._columns})

    def _values(self, table: Table, field: str) -> np.ndarray:
        names, allowed = self._columns[field], self._allowed[field]
        cells = table.columns[names[0]]
        if isinstance(cells, np.ndarray) or isinstance(cells[0], str):  # a text; JSON has numbers and lists
            found = table.checked(allowed, *names)
            return found.reshape(len(found), -1) if field in LISTS else found
        for row, cell in enumerate(cells):
            if field in LISTS:
                self._check_list(table, row, field, cell)
            elif not fits(cell, allowed):
                raise table.misfit(row, field, cell, allowed.expected)
        return np.array(cells, np.float32 if field in FLOATS else np.int64)

    def _check_list(self, table: Table, row: int, field: str, cell: Any) -> None:
        allowed = self._allowed[field]
        width = self._lengths.setdefault(field, len(cell) if isinstance(cell, list) else 0)
        if not isinstance(cell, list) or not cell or len(cell) != width:
            raise table.misfit(row, field, cell, f"{max(width, 1)} numbers, each {allowed.expected}")
        for rank, each in enumerate(cell):
            if not fits(each, allowed):
                raise table.misfit(row, f"{field}[{rank}]", each, allowed.expected)


class _Layers:
    """Numbers of layers: as written, those in their names (`/model/layers.3/moe`), or in the order of first use."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  #: in the order of first use

    def numbers(self, table: Table, column: str) -> np.ndarray:
        """Return (N,) of a table's rows. Raises TraceError for anything but numbers, or names like the earlier ones."""
        cells = table.columns[column]
        named = [cell for cell in dict.fromkeys(cells) if _is_name(cell)] if isinstance(cells, list) else []
        if not named and not self._names:
            return table.checked(COUNT, column)
        for row, cell in enumerate(cells):
            if not _is_name(cell):
                raise table.misfit(row, column, cell, "the name of a layer, as in other rows")
        for name in named:
            self._names.setdefault(name, _in_name(name))
        by_number = len(set(self._names.values())) == len(self._names) and -1 not in self._names.values()
        order = self._names if by_number else {name: at for at, name in enumerate(self._names)}
        if self.by_number is not None and self.by_number != by_number:
            raise TraceError(f"{table.place(0)}: {column} names layers without numbers; number the layers")
        self.by_number = by_number
        return np.array([order[cell] for cell in cells], np.int64)

    by_number: bool | None = None  #: None while no layer has a name

    def said(self) -> list[str]:
        """Describe the assumption about named layers."""
        how = "the numbers in their names" if self.by_number else "the order of first use"
        return [f"layers by {how}"] if self._names else []


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and len(cell) <= MOST_NAME and bool(LAYER_NAME.search(cell)) and number(cell) is None


def _in_name(name: str) -> int:
    """Return the number of a layer's name, -1 if it has none or several."""
    found = LAYER_NUMBER.findall(name) or NUMBER.findall(name)
    return int(found[0]) if len(found) == 1 and len(found[0]) < 6 else -1


def _refuse_crowd(table: Table, request: np.ndarray, token: np.ndarray, layer: np.ndarray) -> None:
    """Raises TraceError for a token at a layer with more rows in a row than a layer has experts."""
    if len(token) <= MOST_EXPERTS:
        return
    same = (np.diff(token) == 0) & (np.diff(layer) == 0) & (np.diff(request) == 0)
    edges = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
    at = int(np.argmax(np.diff(edges)))
    if edges[at + 1] - edges[at] > MOST_EXPERTS:
        wrong = f"more than {MOST_EXPERTS:,} rows of token {token[edges[at]]} at layer {layer[edges[at]]}"
        raise TraceError(f"{table.place(int(edges[at]))}: {wrong}: expected each expert once")


def _array(table: Table, names: tuple[str, ...], allowed: Values) -> np.ndarray | None:
    """Return (N, k) of columns that are arrays of numbers, None of others.

    Raises TraceError for a number out of range.
    """
    if len(names) == 1 and isinstance(table.columns[names[0]], list):
        found = _dense_lists(table.columns[names[0]])
        return found if found is not None and is_allowed(found, allowed).all() else None
    cells = [each for name in names if isinstance(each := table.columns[name], np.ndarray)]
    if len(cells) < len(names) or (len(names) > 1 and any(each.ndim > 1 for each in cells)):
        return None
    found = cells[0] if cells[0].ndim > 1 else np.stack(cells, 1)
    wrong = np.argwhere(~is_allowed(found, allowed))
    if len(wrong):
        row, rank = wrong[0].tolist()
        expected = f"numbers, each {allowed.expected}"
        raise table.misfit(row, names[rank if len(names) > 1 else 0], found[row, rank], expected)
    return found


def _dense_lists(cells: Cells) -> np.ndarray | None:
    """Return (N, k) of texts that are lists of k plain numbers each, None of others."""
    import polars as pl

    if not all(isinstance(cell, str) for cell in cells):
        return None
    texts = pl.Series(cells, dtype=pl.String)
    if not texts.str.contains(PLAIN_LIST).all():
        return None
    lists = texts.str.extract_all(PLAIN_NUMBER)
    if lists.list.len().n_unique() > 1:
        return None
    return lists.explode().cast(pl.Float64).to_numpy().reshape(len(texts), -1)


def _dense(found: Sequence[Sequence[float]], width: int, fill: float) -> np.ndarray:
    """Return (N, width) of lists, `fill` after the last of each."""
    lengths = np.array(list(map(len, found)))
    dense = np.full((len(found), width), float(fill))
    dense[np.arange(width) < lengths[:, None]] = np.concatenate(found)
    return dense


def _lists(table: Table, names: tuple[str, ...], allowed: Values) -> list[list[float]]:
    """Return the numbers of each row, in one cell or in several."""
    if len(names) == 1:
        cells = _listed(table.columns[names[0]])
    else:
        cells = [list(row) for row in zip(*(_listed(table.columns[name]) for name in names), strict=True)]
    within = partial(_fits, allowed=allowed)
    lists = []
    for row, cell in enumerate(cells):
        found = numbers(cell)
        if not found or not all(map(within, found)):
            expected = f"numbers, each {allowed.expected}, as [3, 17], 3 17 or 3;17"
            raise table.misfit(row, names[0], cell, expected)
        lists.append(found)
    return lists


def _listed(cells: Cells) -> list[Any]:
    return cells.tolist() if isinstance(cells, np.ndarray) else cells


def _fits(value: float, allowed: Values) -> bool:
    return allowed.least <= value <= allowed.most and ("f" in allowed.kinds or isinstance(value, int))


def _phases(table: Table, column: str) -> np.ndarray:
    found = [
        PHASES.get(cell.strip().lower(), number(cell)) if isinstance(cell, str) else number(cell)
        for cell in _listed(table.columns[column])
    ]
    for row, value in enumerate(found):
        if value not in (PHASE.least, PHASE.most):
            raise table.misfit(row, column, table.columns[column][row], f"0, 1, {', '.join(PHASES)}")
    return np.array(found, np.int64)
