"""Ids in JSON lines: a line per token, or per token and layer, with each logger's own names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import Keys, Restarts, grids, renumbering
from moereplay.traces.importers.columns import CellRows
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.rows import NARROW, Rows, Seen, fits, refuse_twice, requests_in, streamed
from moereplay.traces.importers.table import COUNT, FIELDS, Names, ids_below, tables
from moereplay.traces.importers.text import blocks, parse_json, start_of, suffix_of
from moereplay.traces.schema import MOST_LAYERS, Request, TraceError, shown
from moereplay.traces.texts import counted

START = re.compile(rb'\s*\{\s*"tok"\s*:\s*\d{1,18}\s*,\s*"layers"\s*:\s*\[')
LONGEST_START = 64  #: bytes
LINE = '{"tok": number, "layers": [[ids of a layer], ...]}'
SORTED = "ids stand in ascending order everywhere: ranks were not recorded"


def sniff_tokens(path: Path) -> bool:
    """Return True for JSON lines whose first begins with `tok` and `layers`."""
    return path.is_file() and suffix_of(path) == ".jsonl" and bool(START.match(start_of(path, LONGEST_START)))


def read_tokens(path: Path, options: Options) -> Foreign:
    """Read JSON lines with a token each, as warp's and OLMoE's recorders publish decoded steps.

        {"tok": 0, "layers": [[5, 1], [3, 7]]}

    `tok` starts at any number and rises by one on every line; `layers` has the experts of every MoE layer in order,
    -1 for "not routed". Neither weights nor prompts are recorded, and ids may be sorted instead of
    in rank order. The file is one request, and may be packed with gzip.

    Return one request. Raises TraceError naming the line that is not as documented.
    """
    if not sniff_tokens(path):
        raise TraceError(f"{path}: invalid first line: expected {LINE} on each line")
    ids, tokens = _read(path)
    layers, k = ids.shape[1:]
    notes = options.phase_note()
    notes += [SORTED] if k > 1 and (ids[:, :, 1:] > ids[:, :, :-1]).all() else []
    origin = Origin(TOKEN_LINES.name, path, [path], decoding="recorded decode steps")
    header = header_for(Shape(layers, k, int(ids.max())), options, origin, notes)
    return Foreign(header, _requests(path, ids, tokens, options))


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (T, L, k), compact because all belong to one request, and tokens (T,)."""
    records, parts = _Records(path), []
    for number, lines in blocks(path, ended=True):
        ids, tokens = records.read(number, lines)
        at = np.repeat(np.arange(number, number + len(lines)), ids.shape[1])
        refuse_twice(path, at, ids.reshape(-1, ids.shape[2]))
        parts.append((ids.astype(NARROW["experts"]), tokens))
    ids, tokens = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ids, tokens


def _requests(path: Path, ids: np.ndarray, tokens: np.ndarray, options: Options) -> Iterator[Request]:
    """Yield the request. Raises TraceError if one of its tokens is missing or repeated."""
    zero = np.zeros_like(tokens)
    for grid in grids(Keys(zero, tokens, zero, 1, 1 + np.arange(len(tokens)), str(path))):
        yield Request(grid.dense(ids, -1)[:, 0], options.prompt_of(grid.tokens, 0))


class _Records:
    """Read lines that must have the same layers and k as the first line."""

    def __init__(self, path: Path) -> None:
        self._path, self._id = path, ids_below(None)
        self._layers = self._k = 0

    def read(self, number: int, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (N, L, k) and tokens (N,) of lines numbered from the given number."""
        found = [self._record(line, f"{self._path} line {at}") for at, line in enumerate(lines, number)]
        ids, tokens = zip(*found, strict=True)
        return np.array(ids, np.int64), np.array(tokens, np.int64)

    def _record(self, line: str, place: str) -> tuple[list[list[int]], int]:
        record = parse_json(line, place)
        if not isinstance(record, dict) or set(record) != {"tok", "layers"} or not fits(record["tok"], COUNT):
            raise TraceError(f"{place}: invalid line: expected {LINE}")
        layers = record["layers"]
        if not isinstance(layers, list) or not layers or len(layers) != (self._layers or len(layers)):
            raise TraceError(
                f"{place}: not {self._layers or 'any'} layers: expected the same number as on the first line"
            )
        self._layers = len(layers)
        for number, ids in enumerate(layers):
            if not self._are_ids(ids):
                expected = f"{self._k or 'some'} ids, each {self._id.expected}"
                raise TraceError(f"{place}: layers[{number}] is {shown(ids)}: expected {expected}")
        return layers, record["tok"]

    def _are_ids(self, ids: Any) -> bool:
        """Return True if this is a list of ids with the same k as every earlier layer."""
        if not isinstance(ids, list) or not ids or len(ids) != (self._k or len(ids)):
            return False
        self._k = len(ids)
        return all(fits(cell, self._id) for cell in ids)


TOKEN_LINES = Importer(
    name="token_lines",
    summary="decoded steps of warp and of OLMoE's recorder: ids, a line per token",
    formats=f"FILE.jsonl with {LINE} on every line",
    sniff=sniff_tokens,
    read=read_tokens,
)


# ---------------------------------------------------------------- a line per token and layer

MOST_RESTARTS = 1 << 32  #: of one id
FEWEST_ALIKE = 32  #: more tokens than real text ever routes identically


@dataclass(frozen=True)
class Form:
    """One logger's names."""

    writer: str
    needed: dict[str, str]
    optional: dict[str, str]

    def columns(self, keys: tuple[str, ...]) -> Names:
        """Return the names that a line with these keys has."""
        named = self.needed | {field: name for field, name in self.optional.items() if name in keys}
        return {field: (named[field],) for field in FIELDS if field in named}


FORMS = (
    Form(
        "lattice",
        {"token": "token_idx", "layer": "layer_idx", "experts": "selected_ids"},
        {"weights": "gate_weights"},
    ),
    Form(
        "speculative-moe",
        {"token": "token_idx", "layer": "layer", "experts": "experts", "weights": "gating_probs"},
        {"request": "problem_id"},
    ),
    Form(
        "a logger of vLLM",
        {"token": "token_idx", "layer": "layer", "experts": "topk_ids"},
        {"weights": "topk_weights", "request": "req_id"},
    ),
    Form(
        "moe-policylang, whose weights are the softmax of the chosen as it is",
        {"token": "t", "layer": "l", "experts": "e"},
        {"weights": "s", "request": "p", "phase": "ph"},
    ),
)


def sniff_named(path: Path) -> bool:
    """Return True for JSON lines with the names of one of the loggers."""
    if not path.is_file() or suffix_of(path) != ".jsonl":
        return False
    try:
        return _form(path)[0] is not None
    except TraceError:
        return False


def read_named(path: Path, options: Options) -> Foreign:
    """Read the JSON lines of loggers that write one per token and layer, each with its own key names (`FORMS`).

        {"layer_idx": 3, "token_idx": 0, "selected_ids": [17, 3], "gate_weights": [0.7, 0.3]}
        {"dataset": "a", "problem_id": 0, "layer": 3, "token_idx": 0, "experts": [6, 5], "gating_probs": [0.7, 0.3]}
        {"type": "route", "req_id": "a", "token_idx": 0, "layer": 3, "topk_ids": [17, 3], "topk_weights": [0.7, 0.3]}

        {"p": 0, "t": 0, "l": 3, "e": [17, 3], "s": [0.5, 0.3], "ph": "prefill"}

    The third may follow a line {"type": "meta", "model_id": ...}, the last one follows {"model_name": ...,
    "num_experts": ...}, as the package moe-policylang 1.15.0 writes them (integrations/trace_recorder.py). A
    request begins with another id of it, and where a layer's token falls back: loggers within an engine count each
    forward pass from 0. Such logs begin with the engine's warm-up pass, thousands of tokens that route alike; it is
    left out.

    Return requests by their ids, in the order of their first lines. Raises TraceError naming the line that is wrong.
    """
    form, keys, meta = _form(path)
    if form is None:
        listed = "; ".join(", ".join(each.needed.values()) for each in FORMS)
        raise TraceError(f"{path}: unknown keys {shown(', '.join(keys))}: expected one of: {listed}")
    columns = form.columns(keys)
    skip = int(meta is not None)
    cells = CellRows(columns)
    seen = Seen(_pieces(path, cells, columns, skip))
    cells.check(seen.k)
    numbered, warm = renumbering(seen.layers), _warm_up(path, columns, skip, seen)
    if warm:
        seen = Seen(_pieces(path, CellRows(columns), columns, skip, warm=True))
    shape = seen.shape(options)
    begun = f"written by {form.writer}, {counted(len(seen.ends.last), 'request')}"
    count = meta.get("num_experts") if meta else None
    if fits(count, ids_below(None)._replace(least=seen.highest + 1)):
        shape = replace(shape, experts=count)
    basis = "line 1 says" if shape.experts == count else "the largest id + 1"
    notes = [
        options.assumed([begun, *numbered, cells.width(seen.k)], shape, basis),
        *([] if seen.phased else options.phase_note()),
        *warm,
    ]
    model = meta.get("model_id", meta.get("model_name")) if meta else None
    origin = Origin(NAMED_JSONL.name, path, [path], model=shown(model) if model else None)
    header = header_for(shape, options, origin, notes)
    found = streamed(path, _pieces(path, CellRows(columns), columns, skip, warm=bool(warm)), seen)
    return Foreign(header, requests_in(found, header.geometry, options))


def _pieces(path: Path, cells: CellRows, columns: Names, skip: int, warm: bool = False) -> Iterator[Rows]:
    """Yield rows in pieces, without the first request if it is the engine's `warm`-up."""
    names, split = [name for each in columns.values() for name in each], _Split()
    for table in tables(path, lambda found: names, skip):
        rows = split.parted(cells.rows(table))
        kept = rows.request > 0 if warm else np.ones(len(rows.request), bool)
        if kept.all():
            yield rows
        elif kept.any():
            yield Rows(path, **{name: values[kept] for name, values in rows.columns().items()})


def _form(path: Path) -> tuple[Form | None, tuple[str, ...], dict[str, Any] | None]:
    """Return whose names the first line of a token has, its keys, and the line before it that describes the run."""
    lines = list(islice((line for _, found in blocks(path) for line in found), 2)) or [""]
    first = _object(lines[0], f"{path} line 1")
    meta = first if first.get("type") == "meta" or {"model_name", "num_experts"} <= set(first) else None
    row = _object(lines[1], f"{path} line 2") if meta and len(lines) > 1 else first
    keys = tuple(key for key, value in row.items() if value is not None)
    return next((form for form in FORMS if set(form.needed.values()) <= set(keys)), None), keys, meta


def _object(line: str, place: str) -> dict[str, Any]:
    found = parse_json(line, place)
    if not isinstance(found, dict):
        raise TraceError(f"{place}: not a JSON object: expected one token at one layer")
    return found


class _Split:
    """Requests of one id, parted where a layer's token falls back, in the order of their first rows."""

    def __init__(self) -> None:
        self._restarts = Restarts()
        self._layers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  #: of requests, by id and restarts

    def parted(self, rows: Rows) -> Rows:
        """Return the rows that come next."""
        stream = rows.request * MOST_LAYERS + _numbered(rows.layer, self._layers)
        again = self._restarts.add(rows.token, stream)
        return replace(rows, request=_numbered(rows.request * MOST_RESTARTS + again, self._numbers))


def _numbered(values: np.ndarray, numbers: dict[int, int]) -> np.ndarray:
    """Return the number (N,) of each value (N,) in the order in which they were first seen, which `numbers` keeps."""
    found, first, row = np.unique(values, return_index=True, return_inverse=True)
    for value in values[np.sort(first)].tolist():
        numbers.setdefault(value, len(numbers))
    return np.array([numbers[value] for value in found.tolist()])[row]


def _warm_up(path: Path, columns: Names, skip: int, seen: Seen) -> list[str]:
    """Return a note if the first request has many tokens with identical routing; else none."""
    first = next(streamed(path, _pieces(path, CellRows(columns), columns, skip), seen))
    ids = [first.experts[first.layer == layer] for layer in range(len(seen.layers))]
    alike = all(len(each) >= FEWEST_ALIKE and (each == each[0]).all() for each in ids)
    if alike and len(seen.ends.last) == 1:
        wrong = f"all {len(ids[0]):,} tokens have identical routing, as in an engine's warm-up pass"
        raise TraceError(f"{path}: {wrong}: expected requests after it; the file may be truncated")
    return [f"left out: the first {counted(len(ids[0]), 'token')}, a warm-up pass with identical routing"] * alike


NAMED_JSONL = Importer(
    name="named_jsonl",
    summary="loggers with a JSON line per token and layer: lattice, speculative-moe, vLLM's, moe-policylang",
    formats="FILE.jsonl with layer_idx, token_idx, selected_ids; layer, token_idx, experts or topk_ids; or t, l, e",
    sniff=sniff_named,
    read=read_named,
)
