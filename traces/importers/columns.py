"""Tables with columns of any names: CSV, TSV, JSON or Parquet, with a row per token and layer, or per expert.

`--columns token=pos,layer=moe_layer,experts=topk` selects columns; the others are found by the names
of their fields: request, token, layer, experts (or expert_0, expert_1, ...), weights and phase. Experts are in one
cell as a list, `[3, 17]`, `3 17` or `3;17`, in several columns, or one on each row, ranks in the order of rows.
Requests may have any name. Without a request column, a request begins where the token number decreases.
Layers may have any numbers, which are taken in ascending order, or names as /model/layers.3/moe. Keys of objects within
a row of JSON are named with dots, and `--where KEY=VALUE` takes some of the rows, as of events of many kinds. An object
on the first line that has other keys than the lines after it, and comments before a CSV, are left out. `phase` is 0 or
1, or prompt, prefill, decode or generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers import exported, responses
from moereplay.traces.importers.by_request import REQUEST, Restarts, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.exported import KEY, sizes_in
from moereplay.traces.importers.rows import FLOATS, KEYS, LISTS, PHASE, Rows, Seen, fits, requests_in, streamed
from moereplay.traces.importers.table import (
    COUNT,
    FIELDS,
    LAYER,
    PARQUET,
    SUFFIXES,
    Cells,
    Names,
    Table,
    header_lines,
    ids_below,
    is_allowed,
    tables,
)
from moereplay.traces.importers.text import blocks, number, numbers, start_of, suffix_of, whole
from moereplay.traces.schema import MOST_EXPERTS, VALUES, Geometry, TraceError, Values, shown
from moereplay.traces.texts import hint

BY_NAME = (".tsv", ".parquet")  #: read without --columns; `generic` reads the others
SAID = "a row per expert, ranks in the order of rows"


def sniff(path: Path) -> bool:
    """Return True for any tsv or parquet file, unless it is our own export."""
    return path.is_file() and suffix_of(path) in BY_NAME and not exported.sniff(path)


def read(path: Path, options: Options) -> Foreign:
    """Return requests by number, or by first appearance. Raises TraceError naming the row that cannot be read."""
    if not path.is_file() or suffix_of(path) not in SUFFIXES:
        raise TraceError(f"{path}: invalid suffix: expected a file ending in {', '.join(SUFFIXES)}")
    return read_as(path, options, options.columns or {}, COLUMNS.name)


def read_as(path: Path, options: Options, asked: Mapping[str, tuple[str, ...]], name: str, said: str = "") -> Foreign:
    """Read a file with known columns for the importer `name`; `said` becomes a note."""
    columns: Names = {}

    def choose(found: tuple[str, ...]) -> list[str]:
        columns.update(columns_of(path, found, asked))
        return list(dict.fromkeys(name for names in columns.values() for name in names))

    skip = 0 if options.where else header_lines(path, choose)

    def rows_of() -> Iterator[Table]:
        return tables(path, choose, skip, options.where)

    cells = CellRows(columns)
    seen = Seen(map(cells.rows, rows_of()))
    cells.check(seen.k)
    own = cells.numbers  # of the requests, which keep them if all of them have one
    if own is not None:
        seen.renumber(own)

    def again(table: Table, second: CellRows) -> Rows:
        rows = second.rows(table)
        return rows if own is None else replace(rows, request=np.take(own, rows.request, mode="clip"))

    def found() -> Iterator[Rows]:
        return streamed(path, map(partial(again, second=CellRows(columns)), rows_of()), seen)

    k = width_of(found(), "row" if suffix_of(path) == PARQUET else "line") if seen.k == 1 else seen.k
    rows = (gathered(one, k) for one in found()) if k > seen.k else found()
    shape = options.shape_of(len(seen.layers), k, seen.highest)
    how = [*cells.said(len(seen.ends.last)), *renumbering(seen.layers), *([SAID] if k > seen.k else [])]
    notes = [options.assumed([*column_words(columns), *how, cells.width(k)], shape), *([said] if said else [])]
    notes += [f"the first {skip} lines describe the others: left out"] if skip > 1 else []
    notes += ["line 1 describes the others: left out"] if skip == 1 else []
    notes += [f"only rows with {options.where[0]} = {options.where[1]} are read"] if options.where else []
    notes += [] if seen.phased else options.phase_note()
    header = header_for(shape, options, Origin(name, path, [path]), notes)
    return Foreign(header, requests_in(rows, header.geometry, options))


# ---------------------------------------------------------------- rows of one expert each


def width_of(requests: Iterable[Rows], unit: str) -> int:
    """Return how many rows a token has at a layer. Raises TraceError naming the row, a `unit`, of one with fewer."""
    first: dict[int, str] = {}
    for rows in requests:
        starts, order = _groups(rows)
        counts = np.diff(np.append(starts, len(order)))
        for count, at in zip(*np.unique(counts, return_index=True), strict=True):
            first.setdefault(int(count), f"{rows.file} {unit} {rows.lines[order[starts[at]]]}")
        if counts.min() == counts.max() > 1:
            gathered(rows, int(counts[0]))  # an expert that stands twice is refused before anything is written
    k = max(first)
    if short := [(count, place) for count, place in first.items() if count != k]:
        count, place = short[0]
        fix = "expected the same number for every token and layer; add rows with expert -1 where fewer were routed"
        raise TraceError(f"{place}: its token has {count} rows at this layer, others have {k}: {fix}")
    return k


def gathered(rows: Rows, k: int) -> Rows:
    """Return the rows of one request, k experts in each."""
    starts, order = _groups(rows)
    first = order[starts]
    return replace(
        rows,
        lines=rows.lines[first],
        request=rows.request[first],
        token=rows.token[first],
        layer=rows.layer[first],
        experts=rows.experts[order].reshape(-1, k),
        weights=None if rows.weights is None else rows.weights[order].reshape(-1, k),
        phase=None if rows.phase is None else rows.phase[first],
    )


def _groups(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return where each token at a layer begins, and the order of the rows (N,) by both."""
    token, layer = rows.token, rows.layer
    order = np.arange(len(token))
    if not ((token[1:] > token[:-1]) | ((token[1:] == token[:-1]) & (layer[1:] >= layer[:-1]))).all():
        order = np.lexsort((layer, token))
        token, layer = token[order], layer[order]
    begins = (token[1:] != token[:-1]) | (layer[1:] != layer[:-1])
    return np.flatnonzero(np.concatenate([[True], begins])), order


COLUMNS = Importer(
    name="columns",
    summary="tables whose column names are passed with `--columns`",
    formats="FILE.tsv or FILE.parquet, and with --columns FILE.csv, .jsonl or .json, with token, layer, experts",
    sniff=sniff,
    read=read,
    columns=True,
)


# -- Find a file's columns of request, token, layer, experts, weights and phase: as passed, or by their names

NEEDED = ("token", "layer", "experts")
SEVERAL = {"experts": "expert", "weights": "weight"}  #: fields of several numbers, and what one of them is called
COUNTS = "counts"  #: no field of a trace: whose counts of an archive become a profile
FORM = "token=NAME,layer=NAME,experts=NAME[,request=NAME,weights=NAME,phase=NAME]"


def columns_named(text: str) -> Names:
    """Return columns as typed: `token=pos,experts=e0+e1`, a list in several columns with +. Raises TraceError."""
    found: Names = {}
    for part in text.split(","):
        field, _, names = part.partition("=")
        field = field.strip()
        if field not in (*FIELDS, COUNTS):
            raise TraceError(
                f"--columns {shown(part)}: unknown field {shown(field)!r}, {hint(field, FIELDS)}; expected {FORM}"
            )
        columns = tuple(name.strip() for name in names.split("+"))
        if not all(columns) or field in found or (len(columns) > 1 and field not in SEVERAL):
            raise TraceError(f"--columns {shown(part)}: expected one name for {field}, given once, as in {FORM}")
        found[field] = columns
    return found


def where_named(text: str) -> tuple[str, str]:
    """Return a column and its value as typed: `event_type=routing`. Raises TraceError."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals:
        raise TraceError(f"invalid --where {shown(text)!r}: expected KEY=VALUE, such as event_type=routing")
    return key, value


def columns_of(file: Path, found: tuple[str, ...], asked: Mapping[str, tuple[str, ...]]) -> Names:
    """Return the columns of each field that the file has. Raises TraceError for one that was named, or is needed."""
    mapped: Names = {field: asked.get(field) or _by_name(field, found) for field in FIELDS}
    for field, names in mapped.items():
        if missing := [name for name in names if name not in found]:
            fix = f"found {shown(', '.join(found), 200)}; correct --columns {field}="
            raise TraceError(f"{file}: missing column {shown(missing[0])}: {fix}")
        if not names and field in NEEDED:
            fix = f"found {shown(', '.join(found), 200)}; pass --columns {field}=NAME"
            raise TraceError(f"{file}: missing column {field}: {fix}")
    return {field: names for field, names in mapped.items() if names}


def _by_name(field: str, found: tuple[str, ...]) -> tuple[str, ...]:
    """Return the column of the field's name; else expert_0, expert_1, ... in the order of their numbers."""
    if field in found or field not in SEVERAL:
        return (field,) if field in found else ()
    matches = [match for name in found if (match := re.fullmatch(rf"{SEVERAL[field]}_([0-9]{{1,5}})", name))]
    return tuple(f"{SEVERAL[field]}_{rank}" for rank in sorted(int(match[1]) for match in matches))


def column_words(columns: Names) -> list[str]:
    """Describe the columns whose names differ from their fields'."""
    return [
        f"columns {shown(names[0])} to {shown(names[-1])} hold the {field}"
        if names[0] != names[-1]
        else f"column {shown(names[0])} {'has' if field in SEVERAL else 'is'} the {field}"
        for field, names in columns.items()
        if names != (field,)
    ]


# -- The plain formats

PLAIN = (".csv", ".jsonl")
COMMENT = b"# "
FIX = "; map other column names with --columns token=NAME,layer=NAME,experts=NAME"


def sniff_generic(path: Path) -> bool:
    """Return True for any csv or jsonl file without a foreign preamble or a server's ids."""
    if not path.is_file() or suffix_of(path) not in PLAIN or responses.has_ids(path):
        return False
    start = start_of(path, len(COMMENT) + 1)
    return not start.startswith(b"#") or start == COMMENT + b"{"


def read_generic(path: Path, options: Options) -> Foreign:
    """Read CSV or JSON lines to which any trace can be converted, one line per request, token and layer.

    CSV, the names on the first line, whole numbers except the weights:

        request,token,layer,expert_0..expert_{k-1}[,weight_0..weight_{k-1}][,phase]

    JSON lines, one object each, the same keys on every line:

        {"request": 0, "token": 0, "layer": 0, "experts": [5, 1], "weights": [0.6, 0.4], "logits": [...], "phase": 0}

    `weights`, `logits` and `phase` are optional. Experts are in rank order, -1 for "not routed"; `logits` are raw, one
    per expert. Tokens of a request are consecutive, layers count from 0 over MoE layers only, and every token has a
    line for every layer; lines may come in any order. `phase` is 0 for prompt tokens and 1 for decoded ones; without it
    every token counts as decoded. Cells of a CSV may stand in quotes, and its last line has a line end, without which
    the file may have been cut off. The first line of either may carry the sizes (in CSV after `# `), with the keys of
    `Geometry`: {"moereplay": {"model": "mine", "layers": 2, "experts": 8, "k": 2, "expert_bytes": [1000, 1000]}}

    Return requests by number. Raises TraceError naming the line that is not as documented.
    """
    if not path.is_file() or suffix_of(path) not in PLAIN:
        raise TraceError(
            f"{path}: invalid suffix: expected a file ending in {' or '.join(PLAIN)}, or in either and .gz"
        )
    _, lines = next(blocks(path), (1, [""]))
    first = lines[0].removeprefix(COMMENT.decode())
    said = sizes_in(first, f"{path} line 1") if first.startswith("{") and f'"{KEY}"' in first else None
    stated = said.geometry if said else None
    skip, experts = (1, stated.experts) if stated else (_header(path), None)
    if next(blocks(path, skip), None) is None:
        raise TraceError(f"{path}: no rows: expected a line per request, token and layer")
    seen = Seen(_plain_pieces(path, skip, experts))
    notes = ["line 1 describes the others: left out"] if skip and not stated else []
    notes += [] if seen.phased else options.phase_note()
    shape = _shape(path, seen, stated)
    origin = Origin(GENERIC.name, path, [path], said and said.model, synthetic=said.synthetic if said else "")
    header = header_for(shape, options, origin, notes)
    return Foreign(
        header, requests_in(streamed(path, _plain_pieces(path, skip, experts), seen), header.geometry, options)
    )


def _header(path: Path) -> int:
    """Return 1 if the first of JSON lines has not the keys that the second has."""
    if suffix_of(path) == ".csv":
        return 0
    return header_lines(path, lambda keys: ("experts",) if {*KEYS, "experts"} <= {*keys} else ())


def _plain_pieces(path: Path, skip: int, experts: int | None) -> Iterator[Rows]:
    """Return the rows after the first `skip` lines, ids below `experts` if that is known."""
    columns: Names = {}

    def choose(found: tuple[str, ...]) -> list[str]:
        columns.update(_plain_columns(found, suffix_of(path) == ".csv", f"{path} line {skip + 1}"))
        return [name for names in columns.values() for name in names]

    return map(ExactRows(columns, experts).rows, tables(path, choose, skip, alike=True))


def _plain_columns(found: tuple[str, ...], single: bool, place: str) -> Names:
    """Return the columns of each field, a column per number if `single`. Raises TraceError for others than these."""
    columns: Names = {name: (name,) for name in KEYS}
    if single:
        k = sum(name.startswith("expert_") for name in found)
        columns["experts"] = tuple(f"expert_{rank}" for rank in range(max(k, 1)))
        if any(name.startswith("weight_") for name in found):
            columns["weights"] = tuple(f"weight_{rank}" for rank in range(k))
    else:
        columns |= {name: (name,) for name in ("experts", "weights", "logits") if name in found or name == "experts"}
    columns |= {"phase": ("phase",)} if "phase" in found else {}
    known = [name for names in columns.values() for name in names]
    for wrong, names in (("missing", set(known) - set(found)), ("unknown", set(found) - set(known))):
        if names:
            column = f"{'column' if single else 'key'} {', '.join(map(shown, sorted(names)))}"
            raise TraceError(f"{place}: {wrong} {column}: expected {','.join(KEYS)},{known[3]},...{FIX}")
    return columns


def _shape(path: Path, seen: Seen, stated: Geometry | None) -> Shape:
    experts, found = seen.logits or (stated.experts if stated else None), seen.layers
    if found[-1] != len(found) - 1:
        missing = np.setdiff1d(np.arange(len(found)), found)[0]
        raise TraceError(
            f"{path}: rows for layer {found[-1]} but none for {missing}: expected consecutive layers from 0"
        )
    layers = max(len(found), stated.layers if stated else 0)
    sizes = stated.expert_bytes if stated else None
    return Shape(layers, seen.k, seen.highest, experts, sizes, stated)


GENERIC = Importer(
    name="generic",
    summary="the documented plain formats for everything else",
    formats="FILE.csv with request,token,layer,expert_0,... or FILE.jsonl with request, token, layer, experts",
    sniff=sniff_generic,
    read=read_generic,
)


# -- Rows by their cells: requests of any name, lists of experts and of weights; or exactly as documented

LAYER_NUMBER = re.compile(r"(?:layers?|blocks?|blk|h)[._/]?(\d+)", re.ASCII | re.IGNORECASE)
LAYER_NAME = re.compile(r"[A-Za-z].*[./_\d]|[./_].*[A-Za-z]", re.ASCII)  #: as modules are named
DIGITS = re.compile(r"\d+", re.ASCII)
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
        if len(token) > MOST_EXPERTS:
            same = (np.diff(token) == 0) & (np.diff(layer) == 0) & (np.diff(request) == 0)
            edges = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
            at = int(np.argmax(np.diff(edges)))
            if edges[at + 1] - edges[at] > MOST_EXPERTS:
                wrong = f"more than {MOST_EXPERTS:,} rows of token {token[edges[at]]} at layer {layer[edges[at]]}"
                raise TraceError(f"{table.place(int(edges[at]))}: {wrong}: expected each expert once")
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
        for rank, value in enumerate(cell):
            if not fits(value, allowed):
                raise table.misfit(row, f"{field}[{rank}]", value, allowed.expected)


class _Layers:
    """Numbers of layers: as written, those in their names (`/model/layers.3/moe`), or in the order of first use."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}  #: and the number in it, -1 if none or several; in the order of first use
        self.by_number: bool | None = None  #: None while no layer has a name

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
            written = LAYER_NUMBER.findall(name) or DIGITS.findall(name)
            self._names.setdefault(name, int(written[0]) if len(written) == 1 and len(written[0]) < 6 else -1)
        by_number = len(set(self._names.values())) == len(self._names) and -1 not in self._names.values()
        order = self._names if by_number else {name: at for at, name in enumerate(self._names)}
        if self.by_number is not None and self.by_number != by_number:
            raise TraceError(f"{table.place(0)}: {column} names layers without numbers; number the layers")
        self.by_number = by_number
        return np.array([order[cell] for cell in cells], np.int64)

    def said(self) -> list[str]:
        """Describe the assumption about named layers."""
        how = "the numbers in their names" if self.by_number else "the order of first use"
        return [f"layers by {how}"] if self._names else []


def _is_name(cell: Any) -> bool:
    return isinstance(cell, str) and len(cell) <= MOST_NAME and bool(LAYER_NAME.search(cell)) and number(cell) is None


def _array(table: Table, names: tuple[str, ...], allowed: Values) -> np.ndarray | None:
    """Return (N, k) of columns that are arrays of numbers, None of others.

    Raises TraceError for a number out of range.
    """
    if len(names) == 1 and isinstance(table.columns[names[0]], list):
        found = _dense_lists(table.columns[names[0]])
        return found if found is not None and is_allowed(found, allowed).all() else None
    cells = [column for name in names if isinstance(column := table.columns[name], np.ndarray)]
    if len(cells) < len(names) or (len(names) > 1 and any(column.ndim > 1 for column in cells)):
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
    least, most, real = allowed.least, allowed.most, "f" in allowed.kinds
    lists = []
    for row, cell in enumerate(cells):
        found = numbers(cell)
        if not found or not all(least <= value <= most and (real or isinstance(value, int)) for value in found):
            expected = f"numbers, each {allowed.expected}, as [3, 17], 3 17 or 3;17"
            raise table.misfit(row, names[0], cell, expected)
        lists.append(found)
    return lists


def _listed(cells: Cells) -> list[Any]:
    return cells.tolist() if isinstance(cells, np.ndarray) else cells


def _phases(table: Table, column: str) -> np.ndarray:
    found = [
        PHASES.get(cell.strip().lower(), number(cell)) if isinstance(cell, str) else number(cell)
        for cell in _listed(table.columns[column])
    ]
    for row, value in enumerate(found):
        if value not in (PHASE.least, PHASE.most):
            raise table.misfit(row, column, table.columns[column][row], f"0, 1, {', '.join(PHASES)}")
    return np.array(found, np.int64)
