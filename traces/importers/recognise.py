"""What a file holds that no importer reads: the keys or columns found, the nearest layouts, and how to name columns.

Text is looked at by its first lines. A layout is near if half of its keys are there. Names that are likely to be the
request, token, layer, experts or weights become a `--columns` that the user can try.
"""

from __future__ import annotations

import csv
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.traces.importers import archive
from moereplay.traces.importers.cells import numbers, whole
from moereplay.traces.importers.table import flat, objects_in
from moereplay.traces.importers.text import blocks, read_json, suffix_of
from moereplay.traces.schema import TraceError, shown
from moereplay.traces.stated import KEY

LOOKED_AT = 200  #: lines
MOST_SMALL = 1 << 22  #: bytes of a JSON document that is read to say what it holds
MOST_NEAR = 3
NEAR = 0.5  #: share of a layout's keys
FEWEST_PLAIN = 3  #: keys of the plain formats with which their importer says what is wrong
PLAIN = "write it as CSV with request,token,layer,expert_0,... (docs/trace-format.md)"

#: Names that fields have in traces seen so far, the last part of a key; lower case.
NAMES = {
    "request": "request request_id req_id req rid r prompt_id prompt_index prompt p seq seq_id sequence sequence_id"
    " sample sample_id problem_id session session_id conversation_id trace_id stream_id",
    "token": "token token_index token_idx token_pos token_position tok tok_idx tok_pos t pos position step decode_step"
    " inference_index",
    "layer": "layer layer_index layer_idx layer_id layer_num layer_number l il moe_layer block node_name qmoe",
    "experts": "experts expert_ids expert_id expert expert_indices expert_idx topk_ids topk_idx topk_indices"
    " topk_experts top_k_ids topk selected_experts selected_ids selected_expert_ids chosen chosen_experts"
    " activated_experts ids indices e ordered_local_topk_expert_ids",
    "weights": "weights gate_weights topk_weights router_weights routing_weights expert_weights probs gate_probs"
    " gating_probs selected_probs ordered_gate_weights w",
    "phase": "phase stage ph",
}


class Layout(NamedTuple):
    """Keys or columns that the files of an importer have."""

    importer: str
    keys: tuple[str, ...]


LAYOUTS = (
    Layout("generic", ("request", "token", "layer", "experts")),
    Layout("generic", ("request", "token", "layer", "expert_0")),
    Layout("llama_ranks", ("phase", "token", "layer", "rank", "expert")),
    Layout("layer_log", ("layer_id", "expert_ids")),
    Layout("named_jsonl", ("layer_idx", "token_idx", "selected_ids")),
    Layout("named_jsonl", ("layer", "token_idx", "experts", "gating_probs")),
    Layout("named_jsonl", ("layer", "token_idx", "topk_ids")),
    Layout("moe_beyond", ("Layer ID", "Batch Number", "Token", "Activated Expert IDs")),
    Layout("dynande", ("layer_id", "token_id", "expert_0")),
    Layout("token_lines", ("tok", "layers")),
    Layout("cache_lab", ("record_type", "token_position", "layer", "selected_experts")),
    Layout("sglang_response", ("meta_info", "text")),
    Layout("vllm_response", ("choices", "prompt_routed_experts")),
    Layout("route_trace", ("turn", "phase", "step", "layer", "slot", "expert", "weight")),
    Layout("count_table", ("layer", "expert", "count")),
)


def explain(path: Path) -> str:
    """What the file or folder holds and what to do, as one line."""
    if path.is_dir():
        fix = "import one of its files, or see docs/trace-format.md"
        return f"{path}: no importer recognises this folder of {_folder(path)}; {fix}"
    if path.suffix == ".npz":
        return f"{path}: no importer recognises it: {_arrays(path)}"
    try:
        records = _records(path)
    except (TraceError, RecursionError, csv.Error) as broken:
        return f"{path}: no importer recognises it: no text that can be read ({shown(broken, 200)}); {PLAIN}"
    if not records:
        return f"{path}: no importer recognises it: {_lines(path)}; {PLAIN}"
    return f"{path}: no importer recognises it: {_of_records(path, records)}"


def lacks_fields(path: Path) -> bool:
    """Whether the first rows of a CSV or of JSON lines have few of the fields of the plain formats."""
    try:
        rows = _records(path)[:2]
    except (TraceError, RecursionError, csv.Error):
        return False
    plain = [set(layout.keys) for layout in LAYOUTS if layout.importer == "generic"]
    return bool(rows) and max(len(each & set(row)) for row in rows for each in plain) < FEWEST_PLAIN


def _records(path: Path) -> list[dict[str, Any]]:
    """The first rows as objects; none if they are none."""
    suffix = suffix_of(path)
    if suffix == ".json" and path.stat().st_size < MOST_SMALL:
        return list(islice(objects_in(read_json(path)), LOOKED_AT))
    lines = list(islice((line for _, found in blocks(path) for line in found), LOOKED_AT))
    while lines and lines[0].startswith(("#", f'{{"{KEY}"')):
        lines.pop(0)
    if lines and lines[0].lstrip().startswith("{"):
        return [each for each in map(_parsed, lines) if isinstance(each, dict)]
    if suffix not in (".csv", ".tsv") or len(lines) < 2:
        return []
    rows = list(csv.reader(lines, delimiter="\t" if suffix == ".tsv" else ","))
    names = [name.strip() for name in rows[0]]
    return [dict(zip(names, row, strict=False)) for row in rows[1:]] if not all(map(_is_number, names)) else []


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    return whole(text) is not None


def _of_records(path: Path, records: list[dict[str, Any]]) -> str:
    """Keys, nearest layouts and columns of rows."""
    best = max(records, key=lambda record: (len(columns_of(flat(record))), -records.index(record)))
    rows, found = flat(best), columns_of(flat(best))
    header = ""
    if best is not records[0] and set(records[0]) != set(best):
        header = "; line 1 is a header" if path.suffix != ".json" else ""
    keys = f"rows have {shown(', '.join(rows), 300)}{header}"
    if {"token", "layer", "experts"} <= set(found):
        return f"{keys}; if these are a token at a layer each, add {_options(records, best, found)}"
    near = _near(set(rows))
    lacking = [field for field in ("token", "layer", "experts") if field not in found]
    told = f"{keys}; the nearest formats: {near}" if near else keys
    return f"{told}; no key looks like {' or '.join(lacking)}: name it with --columns, or {PLAIN}"


def _near(keys: set[str]) -> str:
    """The nearest layouts and what each of them lacks."""
    have = {_folded(key.rpartition(".")[2]) for key in keys}
    scored = []
    for layout in LAYOUTS:
        missing = [key for key in layout.keys if _folded(key) not in have]
        share = 1 - len(missing) / len(layout.keys)
        if missing and share >= NEAR:
            scored.append((-share, f"{layout.importer} (without {', '.join(missing)})"))
    return ", ".join(text for _, text in sorted(scored)[:MOST_NEAR])


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def columns_of(record: dict[str, Any]) -> dict[str, str]:
    """Keys of an object with dots that look like the fields of a row, by their names and values."""
    found: dict[str, str] = {}
    for field, names in NAMES.items():
        wanted = names.split()
        fitting = [key for key in record if key.rpartition(".")[2].lower() in wanted and _fits(field, record[key])]
        if fitting:
            found[field] = min(fitting, key=lambda key: wanted.index(key.rpartition(".")[2].lower()))
    if "experts" not in found:
        others = [key for key in record if "expert" in key.lower() and isinstance(record[key], list)]
        local = [key for key in others if _fits("experts", record[key])]
        if local:
            found["experts"] = min(local, key=lambda key: ("global" in key, "local" not in key))
    return found


def _fits(field: str, value: Any) -> bool:
    """Whether a value may be that of a field."""
    if field in ("request", "phase"):
        return isinstance(value, str | int) and not isinstance(value, bool)
    if field in ("experts", "weights"):
        return bool(numbers(value)) if isinstance(value, list | str | int | float) and value != "" else False
    return whole(value) is not None or (field == "layer" and isinstance(value, str) and any(map(str.isdigit, value)))


def _options(records: list[dict[str, Any]], best: dict[str, Any], found: dict[str, str]) -> str:
    """`--columns` of these keys, and `--where` if only some of the rows have them."""
    others = {field: name for field, name in found.items() if name != field or "." in name}
    columns = ",".join(f"{field}={name}" for field, name in others.items())
    where = ""
    needed = {found[field] for field in ("token", "layer", "experts")}
    unlike = [each for each in records if not needed <= set(flat(each))]
    kinds = [
        key for key, value in best.items() if isinstance(value, str) and all(each.get(key) != value for each in unlike)
    ]
    if unlike and kinds and len(records) > len(unlike):
        kind = min(kinds, key=lambda key: not re.search("type|event|kind|name", key))
        where = f" --where {kind}={best[kind]}" if len(unlike) > 1 or unlike[0] is not records[0] else ""
    return shown(f"--columns {columns}{where}", 400)


def _lines(path: Path) -> str:
    """What text without keys begins with."""
    first = next((line for _, found in blocks(path) for line in found), "")
    return f"its first line is {shown(first, 80)!r}"


def _arrays(path: Path) -> str:
    """The arrays of an npz."""
    names = sorted(archive.members(path))
    listed = shown(", ".join(names), 200) or "no arrays"
    fix = "name that of the ids (tokens, layers, k) with --columns experts=NAME[,weights=NAME]"
    return f"its arrays are {listed}; {fix}; a file per layer is read as a folder"


def _folder(path: Path) -> str:
    """The files in a folder by suffix."""
    suffixes: dict[str, int] = {}
    for entry in sorted(path.iterdir()):
        kind = "folders" if entry.is_dir() else f"*{suffix_of(entry) or entry.name}"
        suffixes[kind] = suffixes.get(kind, 0) + 1
    return shown(", ".join(f"{count} {kind}" for kind, count in list(suffixes.items())[:8]), 200)
