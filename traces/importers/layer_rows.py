"""A JSON document of rows [layer, expert, expert, ...], a row per token and layer, as imp's diagnostics write it.

    [[0, 6, 10, 8], [1, 3, 2, 0], ...]    {"top_k": 3, "trace": [[0, 6, 10, 8], ...]}    [0, 6, 10, 8, 1, 3, 2, 0, ...]

The rows may stand under `trace`, `entries` or `data`. They are decode steps: a token begins where the layer does not
rise, and nothing marks requests. A flat list has rows of `top_k` + 1 numbers; without `top_k` the width is found, if
only one makes the layers come round. In imp a slot of the cache is one of an expert's three matrices: its 186 slots
per layer are 62 experts here. Source: kekzl/imp, tools/analysis/expert_cache_sim.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, assumed, header_for
from moereplay.traces.importers.rows import Rows, Seen, fits, requests_in, streamed
from moereplay.traces.importers.table import LAYER, ids_below
from moereplay.traces.importers.text import read_json, start_of, suffix_of
from moereplay.traces.schema import MOST_EXPERTS, TraceError, shown

LISTS = ("trace", "entries", "data")
START = re.compile(
    rb'\s*(?:\{[^\[\]{}]{0,4000}"(?:trace|entries|data)"\s*:\s*)?\[\s*\[?\s*\d{1,6}\s*,\s*-?\d{1,6}\s*[,\]]'
)
LOOKED_AT = 1 << 13  #: bytes
WIDEST = 65  #: numbers of a row whose width is looked for
FORM = "[[layer, expert, ...], ...], alone or under trace, entries or data, or a flat list and top_k"
DECODED = "decode steps only: no prompts and no borders of requests were recorded"


def sniff(path: Path) -> bool:
    """A JSON document that begins with lists of whole numbers."""
    return path.is_file() and suffix_of(path) == ".json" and bool(START.match(start_of(path, LOOKED_AT)))


def read(path: Path, options: Options) -> Foreign:
    """One request. Raises TraceError naming the row that is wrong."""
    if not path.is_file():
        raise TraceError(f"{path}: expected a JSON document of {FORM}")
    rows, said = _rows(path)
    layer, experts = rows[:, 0], rows[:, 1:]
    token = np.cumsum(np.concatenate([[False], np.diff(layer) <= 0]))
    numbers = np.arange(len(rows))
    found = Rows(path, numbers, np.zeros_like(numbers), token, layer, experts, phase=np.ones_like(numbers))
    seen = Seen([found])
    shape = seen.shape(options)
    notes = [assumed([*said, *renumbering(seen.layers), f"k = {seen.k}; one request"], shape, options), DECODED]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path], decoding="recorded decode steps"), notes)
    return Foreign(header, requests_in(streamed(path, _again(found), seen), header.geometry, options))


def _again(rows: Rows) -> Iterator[Rows]:
    yield rows


def _rows(path: Path) -> tuple[np.ndarray, list[str]]:
    """(N, 1 + k) of the document, -1 where a row is shorter, and how it was read."""
    document, k = read_json(path), None
    if isinstance(document, dict):
        k = document.get("top_k")
        if k is not None and not fits(k, LAYER._replace(least=1, most=MOST_EXPERTS)):
            raise TraceError(f"{path}: top_k is {shown(k)}; expected the experts of a token")
        document = next((document[name] for name in LISTS if isinstance(document.get(name), list)), None)
    if not isinstance(document, list) or not document:
        raise TraceError(f"{path}: no rows; expected {FORM}")
    said = []
    if not isinstance(document[0], list):
        width = k + 1 if k else _width(document, path)
        if len(document) % width:
            raise TraceError(f"{path}: {len(document):,} numbers are no rows of {width}: was it cut off?")
        said = [f"a flat list of rows of {width} numbers"]
        document = [document[at : at + width] for at in range(0, len(document), width)]
    for at, row in enumerate(document):
        _check(row, f"{path} row {at}")
    widest = max(map(len, document))
    return np.array([row + [-1] * (widest - len(row)) for row in document], np.int64), said


def _check(row: Any, place: str) -> None:
    """Raises TraceError for what is no layer with its experts."""
    if not isinstance(row, list) or len(row) < 2:
        raise TraceError(f"{place}: {shown(row)}; expected [layer, expert, ...]")
    if not fits(row[0], LAYER) or not all(fits(each, ids_below(None)) for each in row[1:]):
        raise TraceError(f"{place}: {shown(row)}; expected a layer, then experts, {ids_below(None).expected}")


def _width(numbers: list[Any], path: Path) -> int:
    """The width of rows whose layers come round. Raises TraceError if there is none, or more than one."""
    if not all(type(each) is int for each in numbers):
        raise TraceError(f"{path}: not a flat list of whole numbers; expected {FORM}")
    flat = np.array(numbers, np.float64)
    fitting = [
        width for width in range(2, WIDEST + 1) if len(flat) % width == 0 and _comes_round(flat.reshape(-1, width))
    ]
    if len(fitting) != 1:
        found = f"rows of {' or '.join(map(str, fitting))} numbers fit" if fitting else "no width of rows fits"
        raise TraceError(f'{path}: a flat list without top_k: {found}; write {{"top_k": k, "trace": [...]}}')
    return fitting[0]


def _comes_round(rows: np.ndarray) -> bool:
    """Whether the first numbers (N, 1 + k) rise and begin again with the same ones, and experts differ in each row."""
    layer = rows[:, 0]
    falls = np.flatnonzero(np.diff(layer) <= 0) + 1
    period = int(falls[0]) if len(falls) else len(layer)
    ordered = np.sort(rows[:, 1:], axis=1)
    distinct = not (ordered[:, 1:] == ordered[:, :-1]).any()
    return distinct and len(layer) % period == 0 and bool((layer.reshape(-1, period) == layer[:period]).all())


IMPORTER = Importer(
    name="layer_rows",
    summary="imp's decode traces and others of rows [layer, expert, ...]: ids of every decode step",
    formats="FILE.json of [[layer, expert, ...], ...], alone or under trace, entries or data; or flat, with top_k",
    sniff=sniff,
    read=read,
)
