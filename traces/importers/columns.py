"""Tables with columns of any names: CSV, TSV, JSON lines or Parquet, with a row per token and layer, or per expert.

`--columns token=pos,layer=moe_layer,experts=topk` says which columns are read; those that it leaves out go by the names
of their fields: request, token, layer, experts (or expert_0, expert_1, ...), weights and phase. Experts stand in one
cell as a list, `[3, 17]`, `3 17` or `3;17`, in several columns, or one on each row, ranks in the order of rows.
Requests may be called by any text. Without a column of them a request begins where the token's number falls back.
Layers may have any numbers: they are taken in ascending order. `phase` is 0 or 1, or prompt, prefill, decode or
generated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from traces.importers import exported, mapping
from traces.importers.cells import number, numbers, whole
from traces.importers.contract import Foreign, Importer, Options, Origin, assumed, counted, header_for
from traces.importers.numbering import moe_layers, restarts
from traces.importers.rows import PHASE, Rows, requests_of
from traces.importers.sheet import SUFFIXES, Sheet, read_sheet
from traces.importers.table import COUNT, ids_below
from traces.importers.text import suffix_of
from traces.schema import VALUES, TraceError, Values, shown

BY_NAME = (".tsv", ".parquet")  #: read without --columns; `generic` reads the others
PHASES = {"prompt": 0, "prefill": 0, "decode": 1, "decoding": 1, "generated": 1, "generation": 1}
UNNAMED = "no phase recorded: every token counts as decoded"


def sniff(path: Path) -> bool:
    """Any tsv or parquet file, unless it is our own export."""
    return path.is_file() and suffix_of(path) in BY_NAME and not exported.sniff(path)


def read(path: Path, options: Options) -> Foreign:
    """Requests by number, or by first appearance. Raises TraceError naming the row that cannot be read."""
    if not path.is_file() or suffix_of(path) not in SUFFIXES:
        raise TraceError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}")
    columns: mapping.Columns = {}

    def choose(found: tuple[str, ...]) -> list[str]:
        columns.update(mapping.chosen(path, found, options.columns or {}))
        return list(dict.fromkeys(name for names in columns.values() for name in names))

    sheet = read_sheet(path, choose)
    rows, said = rows_of(sheet, columns)
    shape = counted(rows.experts, len(np.unique(rows.layer)), options)
    notes = [assumed([*mapping.words(columns), *said], shape, options)]
    notes += [] if rows.phase is not None else [UNNAMED]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes)
    return Foreign(header, requests_of(rows, header.geometry, options))


def rows_of(sheet: Sheet, columns: mapping.Columns) -> tuple[Rows, list[str]]:
    """Rows of a token at a layer each, and what was assumed to get them."""
    token = _whole(sheet, columns["token"][0], COUNT)
    layer, layers = moe_layers(_whole(sheet, columns["layer"][0], COUNT))
    request, requests = _requests(sheet, columns, token, layer)
    ids, ragged = _lists(sheet, columns["experts"], ids_below(None), None)
    weights = columns.get("weights")
    rows = Rows(
        sheet.file,
        sheet.first + np.arange(len(token)),
        request,
        token,
        layer,
        ids.astype(np.int64),
        weights=_lists(sheet, weights, VALUES["weights"], ids)[0] if weights else None,
        phase=_phases(sheet, columns["phase"][0]) if "phase" in columns else None,
    )
    rows, gathered = _gathered(sheet, rows) if ids.shape[1] == 1 else (rows, [])
    width = f"k = {rows.experts.shape[1]}{' from the widest row, -1 in the others' if ragged else ''}"
    return rows, [*requests, *layers, *gathered, width]


def _whole(sheet: Sheet, column: str, allowed: Values) -> np.ndarray:
    found = [whole(cell) for cell in sheet.columns[column]]
    for row, value in enumerate(found):
        if value is None or not allowed.least <= value <= allowed.most:
            raise _misfit(sheet, row, column, sheet.columns[column][row], allowed.expected)
    return np.array(found, np.int64)


def _misfit(sheet: Sheet, row: int, column: str, cell: Any, expected: str) -> TraceError:
    spelled = shown(repr(cell) if isinstance(cell, str) else cell)
    return TraceError(f"{sheet.place(row)}: {column} is {spelled}; expected {expected}")


def _requests(
    sheet: Sheet, columns: mapping.Columns, token: np.ndarray, layer: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """The number of each row's request."""
    if "request" not in columns:
        request = restarts(token, layer)
        count = int(request.max()) + 1
        how = f"{count:,} requests, a new one where the token falls back" if count > 1 else "one request"
        return request, [f"no request column: {how}"]
    cells = sheet.columns[columns["request"][0]]
    named = [whole(cell) for cell in cells]
    if all(name is not None and COUNT.least <= name <= COUNT.most for name in named):
        return np.array(named, np.int64), []
    order = {name: at for at, name in enumerate(dict.fromkeys(map(str, cells)))}
    return np.array([order[str(cell)] for cell in cells], np.int64), ["requests in the order of their first rows"]


def _lists(sheet: Sheet, names: tuple[str, ...], allowed: Values, like: np.ndarray | None) -> tuple[np.ndarray, bool]:
    """(N, k) numbers, -1 or 0 after a row's last one, and whether rows differ in how many they have."""
    found = [_list(sheet, row, names, allowed) for row in range(len(sheet.columns[names[0]]))]
    lengths = np.array([len(each) for each in found])
    k = int(lengths.max()) if like is None else like.shape[1]
    wanted = lengths if like is None else (like >= 0).sum(axis=1)
    full = np.full_like(lengths, k)  # -1 in the file is a place of its own
    wrong = np.flatnonzero((lengths != wanted) & (lengths != full))
    if len(wrong):
        row = int(wrong[0])
        raise TraceError(f"{sheet.place(row)}: {lengths[row]} {names[0]} for {wanted[row]} experts; expected as many")
    dense = np.full((len(found), k), -1.0 if like is None else 0.0)
    dense[np.arange(k) < lengths[:, None]] = np.concatenate(found)
    return dense, bool((lengths != k).any())


def _list(sheet: Sheet, row: int, names: tuple[str, ...], allowed: Values) -> list[float]:
    """The numbers of a row, in one cell or in several."""
    cells = [sheet.columns[name][row] for name in names]
    found = numbers(cells[0]) if len(cells) == 1 else numbers(cells)
    within = partial(_fits, allowed=allowed)
    if not found or not all(map(within, found)):
        expected = f"numbers, each {allowed.expected}, as [3, 17], 3 17 or 3;17"
        raise _misfit(sheet, row, names[0], cells[0] if len(cells) == 1 else cells, expected)
    return found


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


def _gathered(sheet: Sheet, rows: Rows) -> tuple[Rows, list[str]]:
    """Rows of one expert each, put together if there are several of a token at a layer."""
    order = np.lexsort((rows.layer, rows.token, rows.request))
    keys = np.stack([rows.request, rows.token, rows.layer])[:, order]
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    counts = np.diff(np.append(starts, len(order)))
    k = int(counts.max())
    if k == 1:
        return rows, []
    short = np.flatnonzero(counts != k)
    if len(short):
        row, count = int(order[starts[short[0]]]), counts[short[0]]
        fix = "expected as many of every token at every layer; add rows with expert -1 where fewer were routed"
        raise TraceError(f"{sheet.place(row)}: its token has {count} rows at this layer, others have {k}; {fix}")
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
    ), ["a row per expert, ranks in the order of rows"]


IMPORTER = Importer(
    name="columns",
    summary="tables with columns of any names, which `--columns` says",
    formats="FILE.tsv or FILE.parquet, and with --columns FILE.csv or FILE.jsonl, with token, layer, experts",
    sniff=sniff,
    read=read,
    columns=True,
)
