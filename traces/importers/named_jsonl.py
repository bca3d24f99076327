"""JSON lines of loggers that write a line per token and layer, each with names of its own (`FORMS`).

    {"layer_idx": 3, "token_idx": 0, "selected_ids": [17, 3], "gate_weights": [0.7, 0.3]}
    {"dataset": "humaneval", "problem_id": 0, "layer": 3, "token_idx": 0, "experts": [6, 5], "gating_probs": [0.7, 0.3]}
    {"type": "route", "req_id": "a", "token_idx": 0, "layer": 3, "topk_ids": [17, 3], "topk_weights": [0.7, 0.3]}

The last may follow a line {"type": "meta", "model_id": ...}. A request begins with another id of it, and where a
layer's token falls back: loggers within an engine count each forward pass from 0. Such logs begin with the engine's
warm-up pass, thousands of tokens that route alike; it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from traces.importers import mapping
from traces.importers.columns import UNNAMED, rows_of
from traces.importers.contract import Foreign, Importer, Options, Origin, assumed, counted, header_for
from traces.importers.numbering import restarts
from traces.importers.rows import Rows, requests_of
from traces.importers.sheet import read_sheet
from traces.importers.text import blocks, parse_json, suffix_of
from traces.schema import TraceError, shown

FEWEST_ALIKE = 32  #: tokens of text never route alike for so long


@dataclass(frozen=True)
class Form:
    """One logger's names."""

    writer: str
    needed: dict[str, str]
    optional: dict[str, str]

    def columns(self, keys: tuple[str, ...]) -> mapping.Columns:
        """The names that a line with these keys has."""
        named = self.needed | {field: name for field, name in self.optional.items() if name in keys}
        return {field: (named[field],) for field in mapping.FIELDS if field in named}


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
)


def sniff(path: Path) -> bool:
    """JSON lines with the names of one of the loggers."""
    if not path.is_file() or suffix_of(path) != ".jsonl":
        return False
    try:
        return _form(path)[0] is not None
    except TraceError:
        return False


def read(path: Path, options: Options) -> Foreign:
    """Requests by their ids, in the order of their first lines. Raises TraceError naming the line that is wrong."""
    form, keys, meta = _form(path)
    if form is None:
        listed = "; ".join(", ".join(each.needed.values()) for each in FORMS)
        raise TraceError(f"{path}: a line has {shown(', '.join(keys))}; expected one of: {listed}")
    columns = form.columns(keys)
    names = [name for each in columns.values() for name in each]
    sheet = read_sheet(path, lambda found: names, skip=int(meta is not None))
    rows, said = rows_of(sheet, columns)
    rows, left = _without_warm_up(_split(rows))
    shape = counted(rows.experts, int(rows.layer.max()) + 1, options)
    begun = f"written by {form.writer}, {len(np.unique(rows.request)):,} requests"
    notes = [assumed([begun, *[each for each in said if "request" not in each]], shape, options), UNNAMED, *left]
    model = meta.get("model_id") if meta else None
    origin = Origin(IMPORTER.name, path, [path], model=shown(model) if model else None)
    header = header_for(shape, options, origin, notes)
    return Foreign(header, requests_of(rows, header.geometry, options))


def _form(path: Path) -> tuple[Form | None, tuple[str, ...], dict[str, Any] | None]:
    """Whose names the first line of a token has, its keys, and the line before it that describes the run."""
    _, lines = next(blocks(path), (1, [""]))
    first = _object(lines[0], f"{path} line 1")
    meta = first if first.get("type") == "meta" else None
    keys = tuple(_object(lines[1], f"{path} line 2") if meta and len(lines) > 1 else first)
    return next((form for form in FORMS if set(form.needed.values()) <= set(keys)), None), keys, meta


def _object(line: str, place: str) -> dict[str, Any]:
    found = parse_json(line, place)
    if not isinstance(found, dict):
        raise TraceError(f"{place}: not an object; expected a token at a layer")
    return found


def _split(rows: Rows) -> Rows:
    """Requests of one id, parted where a layer's token falls back."""
    stream = rows.request * (int(rows.layer.max()) + 1) + rows.layer
    again = restarts(rows.token, stream)
    _, request = np.unique(np.stack([rows.request, again]), axis=1, return_inverse=True)
    return replace(rows, request=_by_first_row(request.reshape(-1)))


def _by_first_row(request: np.ndarray) -> np.ndarray:
    """The same requests, numbered in the order of their first rows."""
    _, first, number = np.unique(request, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _without_warm_up(rows: Rows) -> tuple[Rows, list[str]]:
    """The rows without a first request whose many tokens all route alike, and what is said of it."""
    first = rows.request == 0
    ids = [rows.experts[first & (rows.layer == layer)] for layer in range(int(rows.layer.max()) + 1)]
    alike = all(len(each) >= FEWEST_ALIKE and (each == each[0]).all() for each in ids)
    if not alike:
        return rows, []
    if first.all():
        wrong = f"all {len(ids[0]):,} tokens route alike, as in an engine's warm-up pass"
        raise TraceError(f"{rows.file}: {wrong}; expected requests after it: was the file cut off?")
    kept = ~first
    fields = ("lines", "request", "token", "layer", "experts", "weights", "phase")
    left = {name: None if getattr(rows, name) is None else getattr(rows, name)[kept] for name in fields}
    return replace(rows, **left), [f"left out: the first {len(ids[0]):,} tokens, a warm-up pass that routes all alike"]


IMPORTER = Importer(
    name="named_jsonl",
    summary="loggers with a JSON line per token and layer: lattice, speculative-moe, loggers of vLLM",
    formats="FILE.jsonl with layer_idx, token_idx, selected_ids; layer, token_idx, experts, gating_probs; or topk_ids",
    sniff=sniff,
    read=read,
)
