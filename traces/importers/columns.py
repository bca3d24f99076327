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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from moereplay.traces.importers import exported, responses
from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.cell_rows import CellRows, ExactRows
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.exported import KEY, Stated, sizes_in
from moereplay.traces.importers.rows import KEYS, Rows, Seen, requests_in, streamed
from moereplay.traces.importers.table import FIELDS, PARQUET, SUFFIXES, Names, Table, header_lines, tables
from moereplay.traces.importers.text import blocks, start_of, suffix_of
from moereplay.traces.schema import Geometry, TraceError, shown
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

    cells, again = CellRows(columns), partial(_renumbered, columns)
    seen = Seen(map(cells.rows, rows_of()))
    cells.check(seen.k)
    if cells.numbers is not None:
        seen.renumber(cells.numbers)

    def found() -> Iterator[Rows]:
        return streamed(path, again(rows_of(), cells.numbers), seen)

    k = width_of(found(), "row" if suffix_of(path) == PARQUET else "line") if seen.k == 1 else seen.k
    rows = (gathered(each, k) for each in found()) if k > seen.k else found()
    shape = options.shape_of(len(seen.layers), k, seen.highest)
    how = [*cells.said(len(seen.ends.last)), *renumbering(seen.layers), *([SAID] if k > seen.k else [])]
    notes = [options.assumed([*column_words(columns), *how, cells.width(k)], shape), *([said] if said else [])]
    notes += [f"the first {skip} lines describe the others: left out"] if skip > 1 else []
    notes += ["line 1 describes the others: left out"] if skip == 1 else []
    notes += [f"only rows with {options.where[0]} = {options.where[1]} are read"] if options.where else []
    notes += [] if seen.phased else options.phase_note()
    header = header_for(shape, options, Origin(name, path, [path]), notes)
    return Foreign(header, requests_in(rows, header.geometry, options))


def _renumbered(columns: Names, found: Iterable[Table], numbers: np.ndarray | None) -> Iterator[Rows]:
    """Yield the rows of the second reading; requests keep their own numbers if all of them have one."""
    for rows in map(CellRows(columns).rows, found):
        yield rows if numbers is None else replace(rows, request=np.take(numbers, rows.request, mode="clip"))


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
    numbers = [int(each[1]) for name in found if (each := re.fullmatch(rf"{SEVERAL[field]}_([0-9]{{1,5}})", name))]
    return tuple(f"{SEVERAL[field]}_{number}" for number in sorted(numbers))


def column_words(columns: Names) -> list[str]:
    """Describe the columns whose names differ from their fields'."""
    others = {field: names for field, names in columns.items() if names != (field,)}
    return [_words(field, names) for field, names in others.items()]


def _words(field: str, names: tuple[str, ...]) -> str:
    first, *_, last = (*names, *names)
    if first != last:
        return f"columns {shown(first)} to {shown(last)} hold the {field}"
    return f"column {shown(first)} {'has' if field in SEVERAL else 'is'} the {field}"


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
    said = _metadata(path, lines[0])
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


def _metadata(path: Path, line: str) -> Stated | None:
    """Return the model's facts from the first line, if it states any."""
    first = line.removeprefix(COMMENT.decode())
    if not first.startswith("{") or f'"{KEY}"' not in first:
        return None
    return sizes_in(first, f"{path} line 1")


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
