"""Lines of the plain formats as columns, and the requests they make up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traces.importers.contract import Options, prompt_tokens
from traces.importers.grid import Grid, Keys, grids, prompt_of
from traces.importers.sources import parse_json
from traces.importers.table import EXACT, Table, require
from traces.schema import Geometry, Request, TraceError

KEYS = ("request", "token", "layer")
OPTIONAL = ("weights", "logits", "phase")
FLOATS = ("weights", "logits")
LISTS = ("experts", *FLOATS)


@dataclass(frozen=True)
class Rows:
    """N lines, each one token at one layer; `lines` are their numbers in the file."""

    file: Path
    lines: np.ndarray
    request: np.ndarray
    token: np.ndarray
    layer: np.ndarray
    experts: np.ndarray  #: (N, k)
    weights: np.ndarray | None = None  #: (N, k)
    logits: np.ndarray | None = None  #: (N, E)
    phase: np.ndarray | None = None


def from_table(table: Table) -> Rows:
    """Rows of a CSV. Raises TraceError on missing, unknown or wrong columns."""
    k = sum(name.startswith("expert_") for name in table.columns)
    experts = [f"expert_{rank}" for rank in range(max(k, 1))]
    weights = [f"weight_{rank}" for rank in range(k)]
    require(table, *KEYS, *experts)
    unknown = set(table.columns) - {*KEYS, *experts, *weights, "phase"}
    if unknown or len(set(table.columns)) < len(table.columns):
        names = ", ".join(sorted(unknown)) or "a repeated column"
        place = f"{table.file} line {table.first_line - 1}"
        raise TraceError(f"{place}: {names} not known; expected {','.join(KEYS)},expert_0,...")
    weighed = any(name in table for name in weights)
    if weighed:
        require(table, *weights)
    return Rows(
        table.file,
        table.lines,
        request=table.whole("request"),
        token=table.whole("token"),
        layer=table.whole("layer"),
        experts=table.whole(*experts, least=-1).reshape(-1, k),
        weights=table.numbers(*weights).reshape(-1, k) if weighed else None,
        phase=_phases(table.whole("phase"), table.file, table.lines) if "phase" in table else None,
    )


def from_jsonl(file: Path, lines: list[str], skip: int) -> Rows:
    """Rows of JSON lines after the first `skip`. Raises TraceError naming the line that differs from the first."""
    records = [_record(line, f"{file} line {number}") for number, line in enumerate(lines[skip:], skip + 1)]
    _refuse_new_keys(records, file, skip + 1)
    numbers = np.arange(skip + 1, len(lines) + 1)
    columns: dict[str, np.ndarray] = {}
    for name in ("request", "token", "layer", "experts", *(key for key in OPTIONAL if key in records[0])):
        columns[name] = _column(records, name, file, skip + 1)
    if "phase" in columns:
        columns["phase"] = _phases(columns["phase"], file, numbers)
    return Rows(file, numbers, **columns)


def _record(line: str, place: str) -> dict[str, Any]:
    record = parse_json(line, place)
    if not isinstance(record, dict):
        raise TraceError(f"{place}: not an object; expected keys {', '.join(KEYS)}, experts")
    unknown = set(record) - {*KEYS, "experts", *OPTIONAL}
    missing = {*KEYS, "experts"} - set(record)
    if unknown or missing:
        wrong = f"unknown key {sorted(unknown)[0]!r}" if unknown else f"no {sorted(missing)[0]!r}"
        raise TraceError(f"{place}: {wrong}; expected {', '.join((*KEYS, 'experts'))}, perhaps {', '.join(OPTIONAL)}")
    return record


def _refuse_new_keys(records: list[dict[str, Any]], file: Path, first: int) -> None:
    for number, record in enumerate(records, first):
        if record.keys() != records[0].keys():
            wanted = ", ".join(records[0])
            raise TraceError(f"{file} line {number}: keys {', '.join(record)}; expected {wanted}, as on line {first}")


def _column(records: list[dict[str, Any]], name: str, file: Path, first: int) -> np.ndarray:
    """One key of all records as an array, (N,) or (N, size of the first list); checked line by line."""
    length = len(records[0][name]) if isinstance(records[0][name], list) else 0
    for number, record in enumerate(records, first):
        if not _fits(record[name], name, length):
            what = "numbers" if name in FLOATS else "whole numbers" if name in LISTS else "a whole number from 0"
            size = f"{max(length, 1)} {what}" if name in LISTS else what
            raise TraceError(f"{file} line {number}: {name} is {str(record[name])[:40]}; expected {size}")
    return np.array([record[name] for record in records], np.float32 if name in FLOATS else np.int64)


def _fits(value: Any, name: str, length: int) -> bool:
    if name not in LISTS:
        return type(value) is int and 0 <= value < EXACT
    if not isinstance(value, list) or not value or len(value) != length:
        return False
    types = (int, float) if name in FLOATS else (int,)
    return all(type(cell) in types and abs(cell) < EXACT for cell in value)


def _phases(phase: np.ndarray, file: Path, lines: np.ndarray) -> np.ndarray:
    wrong = np.flatnonzero((phase < 0) | (phase > 1))
    if len(wrong):
        raise TraceError(f"{file} line {lines[wrong[0]]}: phase {phase[wrong[0]]}; expected 0 (prompt) or 1 (decode)")
    return phase


def requests_of(rows: Rows, geometry: Geometry, options: Options) -> Iterator[Request]:
    """The requests by number. Raises TraceError naming request and layer if a layer lacks tokens that others have."""
    place = str(rows.file)
    for grid in grids(Keys(rows.request, rows.token, rows.layer, geometry.layers, rows.lines, place)):
        _refuse_holes(grid, place)
        prompt = 0 if rows.phase is None else prompt_of(grid.dense(rows.phase, 0)[:, 0], grid.request, place)
        yield Request(
            grid.dense(rows.experts, -1),
            prompt_tokens(options, grid.tokens, prompt),
            weights=None if rows.weights is None else grid.dense(rows.weights, 0),
            logits=None if rows.logits is None else grid.dense(rows.logits, 0),
        )


def _refuse_holes(grid: Grid, place: str) -> None:
    per_layer = grid.filled.sum(0)
    short = np.flatnonzero(per_layer < grid.tokens)
    if len(short):
        layer = int(short[0])
        token = grid.first_token + int(np.flatnonzero(~grid.filled[:, layer])[0])
        raise TraceError(
            f"{place}: request {grid.request}: layer {layer} has {per_layer[layer]} tokens of {grid.tokens} "
            f"(token {token} is missing); expected every token at every layer"
        )
