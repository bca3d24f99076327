"""Read a foreign trace with the named importer, or with the first one that recognises it.

Ids that are not experts of their layer are renumbered here: ids that continue through the layers (`--ids global`),
and ids of experts without weights (`--real-experts`).
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.files import install_contrib
from moereplay.traces.importers import BUILT_IN, CATCH_ALLS, archive, arrays, plug_ins, table
from moereplay.traces.importers.contract import ASSUMED, Foreign, Importer, Options
from moereplay.traces.importers.exported import KEY
from moereplay.traces.importers.sources import TORCH_SUFFIXES, refuse_known, refuse_unreadable
from moereplay.traces.importers.table import flat, objects_in
from moereplay.traces.importers.text import binary_start, blocks, numbers, read_json, suffix_of, whole
from moereplay.traces.importers.torch_file import Archive, Tensor
from moereplay.traces.patterns import experts_per_layer, ranges_by_layer
from moereplay.traces.schema import Geometry, Header, Request, TraceError, shown
from moereplay.traces.texts import hint

COLUMNS, PLAIN = "columns", "generic"  #: importers of named columns, and of the plain formats


def names() -> tuple[str, ...]:
    """Return the formats that can be imported, those of plug-ins too, in the order in which they are tried."""
    return (*BUILT_IN, *plug_ins.plug_ins(), *CATCH_ALLS)


def load(name: str) -> Importer:
    """Return the importer of that name. Raises TraceError naming the plug-in to install, or the nearest name."""
    if module := (BUILT_IN | CATCH_ALLS).get(name):
        return getattr(importlib.import_module(f"moereplay.traces.importers.{module}"), name.upper())
    if name in plug_ins.plug_ins():
        return plug_ins.load(name)
    if name in plug_ins.contributed():
        raise TraceError(f"format {name} needs a plug-in: run `{install_contrib('importers')}`")
    raise TraceError(f"unknown format {name!r}: {hint(name, names())}")


def detect(path: Path, warn: Callable[[str], None] = lambda line: None) -> Importer:
    """Return the first importer that recognises the file or folder; `warn` gets a line for each broken plug-in.

    Raises TraceError if none does, naming the plug-in to install if the file is of a format of moereplay-importers.
    """
    refuse_unreadable(path)
    for name in names():
        if name == next(iter(CATCH_ALLS)):
            plug_ins.refuse_contributed(path)
        try:
            importer = load(name)
        except TraceError as broken:
            warn(str(broken))
            continue
        if importer.sniff(path):
            return importer
    raise TraceError(explain(path))


def markdown(formats: Iterable[str]) -> str:
    """Return the Markdown table of these formats: docs/trace-format.md has the built-in ones, a plug-in has its own."""
    rows = [f"| `{importer.name}` | {importer.summary} | {importer.formats} |" for importer in map(load, formats)]
    return "\n".join(["| format | what | read from |", "|---|---|---|", *rows])


def read(
    path: Path, options: Options, format: str | None = None, warn: Callable[[str], None] = lambda line: None
) -> Foreign:
    """Read the header, and lazily the requests, by the importer named or detected (`warn`: see `detect`).

    Raises TraceError.
    """
    refuse_unreadable(path)
    suffix = suffix_of(path) if (options.columns or options.where) and path.is_file() else None
    of_columns = COLUMNS if suffix in table.SUFFIXES else "arrays" if suffix in arrays.SUFFIXES else None
    importer = load(format or of_columns or "") if format or of_columns else detect(path, warn)
    if importer.name == PLAIN and format is None and lacks_fields(path):
        raise TraceError(explain(path))
    if options.where and importer.name != COLUMNS:
        raise TraceError(
            f"{path}: --where requires --columns and a CSV or JSON file; importer {importer.name} reads all rows"
        )
    if options.columns and not importer.columns:
        raise TraceError(f"{path}: --columns cannot be combined with importer {importer.name}, whose columns are fixed")
    if options.shape and not importer.flat:
        raise TraceError(
            f"{path}: --shape requires a server's responses; importer {importer.name} reads the shape from the file"
        )
    if options.axes and not importer.arrays:
        raise TraceError(f"{path}: --axes requires an array; importer {importer.name} reads rows that name their layer")
    if options.renumbers:
        return remapped(path, lambda: importer.read(path, options), options)
    return importer.read(path, options)


# ---------------------------------------------------------------- ids that are not experts of their layer


def remapped(path: Path, read: Callable[[], Foreign], options: Options) -> Foreign:
    """Return the trace with ids of each layer. Raises TraceError if its ids are not of the kind that options name."""
    foreign = read()
    if options.ids == "global":
        foreign = _local(path, foreign, read, options)
    if options.real_experts is not None:
        plain = options.model_copy(update={"real_experts": None})
        foreign = _real(path, foreign, lambda: remapped(path, read, plain), options.real_experts, options.geometry)
    return foreign


def _with(header: Header, experts: int, path: Path, *notes: str) -> Header:
    if header.geometry.k > experts:
        raise TraceError(
            f"{path}: {header.geometry.k} experts per token: expected at most {experts}, the experts of a layer"
        )
    provenance = header.provenance.model_copy(update={"notes": (*header.provenance.notes, *notes)})
    geometry = header.geometry.model_copy(update={"experts": experts})
    return header.model_copy(update={"geometry": geometry, "provenance": provenance})


def _local(path: Path, foreign: Foreign, read: Callable[[], Foreign], options: Options) -> Foreign:
    """Renumber each layer's ids from 0 on. Reads the file once more."""
    least, most = ranges_by_layer(request.chosen for request in foreign.requests)
    experts = experts_per_layer(least, most, options.geometry.experts if options.geometry else None)
    if experts is None:
        seen = ", ".join(f"{low} to {high}" for low, high in zip(least[:3].tolist(), most[:3].tolist(), strict=True))
        raise TraceError(
            f"{path}: the ids do not count on through the layers (layers 0, 1, ... have {seen}, ...); "
            "omit --ids global, or pass the model that it was recorded with"
        )
    first = least // experts * experts
    note = f"{ASSUMED}ids count on through the layers (--ids global): {experts} in each, layer 0 from {first[0]} on"

    def local() -> Iterator[Request]:
        for request in read().requests:
            ids = np.where(request.chosen < 0, -1, request.chosen.astype(np.int64) - first[:, None])
            yield replace(request, chosen=ids)

    return Foreign(_with(foreign.header, experts, path, note), local())


def _real(path: Path, foreign: Foreign, read: Callable[[], Foreign], experts: int, model: Geometry | None) -> Foreign:
    """Keep the ids below `experts`; set the others to -1 with weight 0 and move them to the end.

    Reads the file once more. Raises TraceError if the model has another number of experts, or if no id reaches it.
    """
    if model is not None and model.experts != experts:
        raise TraceError(
            f"{path}: invalid --real-experts {experts}: expected {model.experts}, the number of experts with weights "
            "of the model"
        )
    largest, choices, away = -1, 0, 0
    for request in foreign.requests:
        largest = max(largest, int(request.chosen.max(initial=-1)))
        choices += int((request.chosen >= 0).sum())
        away += int((request.chosen >= experts).sum())
    if not away:
        raise TraceError(
            f"{path}: invalid --real-experts {experts}: expected at most {largest}, the largest id; leave it "
            "out if every expert has weights"
        )
    note = (
        f"ids from {experts} to {largest} are experts without weights (--real-experts), {100 * away / choices:.3g}% of "
        "all choices: kept as not routed (-1); logits and look-ahead, if there are any, are left out"
    )
    header = _with(foreign.header, experts, path, note)
    header = header.model_copy(update={"lookahead_depth": 0})
    return Foreign(header, _below(read().requests, experts))


def _below(requests: Iterable[Request], experts: int) -> Iterator[Request]:
    for request in requests:
        away = (request.chosen >= experts) | (request.chosen < 0)
        order = np.argsort(away, -1, kind="stable")
        away = np.take_along_axis(away, order, -1)
        moved = {
            name: np.where(away, empty, np.take_along_axis(rows, order, -1))
            for name, empty in (("chosen", -1), ("weights", 0), ("residency", -1))
            if (rows := getattr(request, name)) is not None
        }
        yield replace(request, logits=None, lookahead=(), **moved)


# ---------------------------------------------------------------- files that no importer reads
# The message names keys or columns, the nearest layouts, and a --columns to try. A layout is near if half of its keys
# are there.

LOOKED_AT = 200  #: lines
MOST_SMALL = 1 << 22  #: most bytes of a JSON document that is read to describe it
MOST_NEAR = 3
NEAR = 0.5  #: share of a layout's keys
FEWEST_PLAIN = 3  #: keys of the plain formats, whose importer reports errors itself
AS_ARRAY = "save the ids as an array (tokens, layers, k) with numpy.save"
AS_CSV = "convert it to CSV with request,token,layer,expert_0,... (docs/trace-format.md)"

#: Names that fields have in traces seen so far, the last part of a key; lower case.
FIELD_NAMES = {
    "request": "request request_id req_id req rid r prompt_id prompt_index prompt p seq seq_id sequence sequence_id"
    " sample sample_id problem_id session session_id conversation_id trace_id stream_id",
    "token": "token token_index token_idx token_pos token_position tok tok_idx tok_pos t pos position step decode_step"
    " inference_index",
    "layer": "layer layer_index layer_idx layer_id layer_num layer_number l il moe_layer block node_name qmoe",
    "experts": "experts expert_ids expert_id expert expert_indices expert_idx topk_ids topk_idx topk_indices"
    " topk_experts top_k_ids topk top_indices selected_experts selected_ids selected_expert_ids chosen chosen_experts"
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
    """Describe the file or folder and what to do, in one line."""
    if path.is_dir() and (path / "zarr.json").exists():
        return f"{path}: this folder is a trace already; pass it to `moereplay inspect` or `moereplay replay`"
    if path.is_dir():
        names = [
            "folders" if entry.is_dir() else f"*{suffix_of(entry) or entry.name}" for entry in sorted(path.iterdir())
        ]
        kinds = shown(", ".join(f"{count} {kind}" for kind, count in list(Counter(names).items())[:8]), 200)
        return f"{path}: no importer recognises this folder of {kinds}; {_first_in(path)}"
    return f"{path}: no importer recognises it: {_content(path)}"


def _content(path: Path) -> str:
    if path.suffix == ".npz":
        listed = shown(", ".join(sorted(archive.members(path))), 200) or "no arrays"
        fix = "pass the array of ids (tokens, layers, k) with --columns experts=NAME[,weights=NAME]"
        return f"its arrays are {listed}; {fix}; if there is one file per layer, pass their folder"
    if path.suffix in TORCH_SUFFIXES:
        root = Archive(path).root
        named = root.items() if isinstance(root, dict) else [("tensor", root)]
        tensors = [f"{shown(name)} {value.shape}" for name, value in named if isinstance(value, Tensor)]
        return f"its tensors are {shown(', '.join(tensors), 200) or 'none'}; {AS_ARRAY}, a text in each file"
    if binary := binary_start(path):
        return f"{binary}; {AS_ARRAY}, or {AS_CSV}"
    try:
        records = _records(path)
    except (TraceError, RecursionError, csv.Error) as broken:
        return f"unreadable text ({shown(broken, 200)}); {AS_CSV}"
    if records:
        return _of_records(path, records)
    first = next((line for _, lines in blocks(path) for line in lines), "")
    return f"its first line is {shown(first, 80)!r}; {AS_CSV}"


def lacks_fields(path: Path) -> bool:
    """Return whether the first rows of a CSV or of JSON lines lack most fields of the plain formats."""
    try:
        rows = _records(path)[:2]
    except (TraceError, RecursionError, csv.Error):
        return False
    plain = [set(layout.keys) for layout in LAYOUTS if layout.importer == "generic"]
    return bool(rows) and max(len(each & set(row)) for row in rows for each in plain) < FEWEST_PLAIN


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the first rows as objects, none for a text without keys."""
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
    return [dict(zip(names, row, strict=False)) for row in rows[1:]] if None in map(whole, names) else []


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _of_records(path: Path, records: list[dict[str, Any]]) -> str:
    """Describe rows by keys, nearest layouts and columns."""
    best = max(records, key=lambda record: (len(columns_of(flat(record))), -records.index(record)))
    rows, found = flat(best), columns_of(flat(best))
    header = ""
    if best is not records[0] and set(records[0]) != set(best):
        header = "; line 1 is a header" if path.suffix != ".json" else ""
    keys = f"rows have {shown(', '.join(rows), 300)}{header}"
    if {"token", "layer", "experts"} <= set(found):
        return f"{keys}; if each row is one token at one layer, pass {_options(records, best, found)}"
    near = _near(set(rows))
    lacking = [field for field in ("token", "layer", "experts") if field not in found]
    told = f"{keys}; the nearest formats: {near}" if near else keys
    passes = [key for key, value in rows.items() if isinstance(value, list) and value and isinstance(value[0], list)]
    if passes and "experts" in lacking:
        return f"{told}; {passes[0]} has a list of each token: a row is a pass; {AS_CSV}"
    return f"{told}; no key resembles {' or '.join(lacking)}: pass it with --columns, or {AS_CSV}"


def _near(keys: set[str]) -> str:
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
    """Return the keys that look like fields of a row, by their names and values."""
    found: dict[str, str] = {}
    for field, names in FIELD_NAMES.items():
        wanted = names.split()
        fitting = [key for key in record if key.rpartition(".")[2].lower() in wanted and _fits(field, record[key])]
        if field == "experts":  # a number of a name like topk is k; one expert on each row is named so
            fitting = [key for key in fitting if not isinstance(record[key], int) or "expert" in key.lower()]
        if fitting:
            found[field] = min(fitting, key=lambda key: wanted.index(key.rpartition(".")[2].lower()))
    others = [key for key in record if "expert" in key.lower() and isinstance(record[key], list)]
    local = [key for key in others if _fits("experts", record[key])]
    if "experts" not in found and local:
        found["experts"] = min(local, key=lambda key: ("global" in key, "local" not in key))
    return found


def _fits(field: str, value: Any) -> bool:
    if field in ("request", "phase"):
        return isinstance(value, str | int) and not isinstance(value, bool)
    if field in ("experts", "weights"):
        return bool(numbers(value)) if isinstance(value, list | str | int | float) and value != "" else False
    return whole(value) is not None or (field == "layer" and isinstance(value, str) and any(map(str.isdigit, value)))


def _options(records: list[dict[str, Any]], best: dict[str, Any], found: dict[str, str]) -> str:
    """Return `--columns` of these keys, and `--where` if only some of the rows have them."""
    others = {field: name for field, name in found.items() if name != field or "." in name}
    columns = ",".join(f"{field}={name}" for field, name in others.items())
    where = ""
    needed = {found[field] for field in ("token", "layer", "experts")}
    unlike = [record for record in records if not needed <= set(flat(record))]
    kinds = [
        key for key, value in best.items() if isinstance(value, str) and all(each.get(key) != value for each in unlike)
    ]
    if unlike and kinds and len(records) > len(unlike):
        kind = min(kinds, key=lambda key: not re.search("type|event|kind|name", key))
        where = f" --where {kind}={best[kind]}" if len(unlike) > 1 or unlike[0] is not records[0] else ""
    return shown(f"--columns {columns}{where}", 400)


def _first_in(path: Path) -> str:
    """Return what to do with a folder: what is known of a file in one of its folders, or import one of its files."""
    for file in islice((file for file in sorted(path.glob("*/*")) if file.is_file()), MOST_NEAR):
        try:
            refuse_known(file)
        except TraceError as known:
            return str(known)
    return "import one of its files, or see docs/trace-format.md"
