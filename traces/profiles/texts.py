"""Counts in texts: colibri's lines, reports and maps of JSON, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers import sources
from moereplay.traces.importers.rows import fits
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import COUNT, LAYER, ids_below, read_table
from moereplay.traces.importers.text import blocks, holds, parse_json, read_json, start_of, suffix_of
from moereplay.traces.profiles.contract import MOST_CELLS, MOST_COUNT, Counts, Form, check_size, checked, tabulated
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, TraceError, Values, shown

# -- The use counts that colibri keeps next to a model, `.coli_usage`: `layer expert count` per line, no zeros.
# -- Two lines may precede them: `-1 layers experts`, and `-2 version engine`, the engine as an FNV-1a hash. Its
# -- inkling engine writes the same as numbers instead: "IKU1", layers and experts as uint32, then a uint32 per layer
# -- and expert. Source: JustVugg/colibri, route_trace.h. Layers are the model's own numbers.

LINE = re.compile(r"\s*(-[12]|\d{1,5})\s+(\d{1,5})\s+(\d{1,15})\s*", re.ASCII)
COLI_START = re.compile(rb"(-[12]|\d{1,5}) \d{1,5} \d{1,15}\r?\n")
LONGEST_COLI_START = 64  #: bytes
SIZES, WRITER = -1, -2  #: in place of a layer
VERSION = 1
ENGINES = ("glm_moe_dsa", "inkling", "olmoe", "kimi_k3", "deepseek_v4", "qwen38", "glm53")
IKU1 = b"IKU1"
WORD = np.dtype("<u4")
COLI_LINE = "`layer expert count` on every line"


def sniff_coli_usage(path: Path) -> bool:
    """Recognise a text that begins with three numbers, or inkling's magic number."""
    if not path.is_file():
        return False
    start = start_of(path, LONGEST_COLI_START)
    return bool(COLI_START.match(start)) or start.startswith(IKU1)


def read_coli_usage(path: Path) -> Counts:
    """Read the counts. Raises TraceError naming the first invalid line."""
    if start_of(path, len(IKU1)) == IKU1:
        return _inkling(path)
    cells: dict[tuple[int, int], float] = {}
    sizes: tuple[int, int] | None = None
    notes: list[str] = []
    for at, (layer, expert, count) in _coli_lines(path):
        if layer == SIZES:
            sizes = expert, count
        elif layer == WRITER:
            if expert > VERSION:
                raise TraceError(f"{path} line {at}: unknown version {expert}: expected {VERSION}")
            names = {hash_of(name): name for name in ENGINES}
            notes.append(f"written by colibri's engine {names.get(count, f'{count:08x}')}")
        elif (layer, expert) in cells or len(cells) == MOST_CELLS:
            wrong = f"layer {layer}, expert {expert} is repeated" if (layer, expert) in cells else "too many lines"
            raise TraceError(f"{path} line {at}: {wrong}: expected each expert of a model once")
        else:
            cells[layer, expert] = count
    if sizes:
        _check_coli_sizes(path, cells, *sizes)
    else:
        notes.append("no line of sizes: experts = the highest id + 1")
    return tabulated(path, cells, sizes[1] if sizes else None, tuple(notes))


def _coli_lines(path: Path) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield line numbers and the three numbers of each line."""
    for number, lines in blocks(path, ended=True):
        for at, line in enumerate(lines, number):
            found = LINE.fullmatch(line)
            if found is None:
                raise TraceError(f"{path} line {at}: invalid line {shown(line)!r}: expected {COLI_LINE}")
            layer, expert, count = map(int, found.groups())
            yield at, (layer, expert, count)


def hash_of(name: str) -> int:
    """Return the 32-bit FNV-1a hash of an engine's name."""
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def _check_coli_sizes(path: Path, cells: dict[tuple[int, int], float], layers: int, experts: int) -> None:
    """Check cells against the stated sizes; one more layer is allowed, for multi-token prediction."""
    if not 0 < experts <= MOST_EXPERTS or layers > MOST_LAYERS:
        raise TraceError(f"{path}: invalid sizes of {layers} layers of {experts} experts: expected a model's sizes")
    beyond = [place for place in cells if place[0] > layers or place[1] >= experts]
    if beyond:
        layer, expert = beyond[0]
        raise TraceError(
            f"{path}: layer {layer}, expert {expert}: its first lines state {layers} layers, {experts} experts"
        )


def _inkling(path: Path) -> Counts:
    head = np.fromfile(path, WORD, 3)
    layers, experts = (int(word) for word in head[1:]) if len(head) == 3 else (0, 0)
    check_size(path, layers, experts)
    if path.stat().st_size != WORD.itemsize * (len(head) + layers * experts):
        raise TraceError(
            f"{path}: {layers} layers of {experts} experts do not match the size of the file: it may be truncated"
        )
    chosen = np.fromfile(path, WORD, offset=head.nbytes).reshape(layers, experts)
    return checked(path, chosen, ("written by colibri's engine inkling",))


COLI_USAGE = Form(
    name="coli_usage",
    summary="use counts that colibri keeps next to a model",
    formats="FILE.coli_usage with `layer expert count` on every line, or inkling's IKU1",
    sniff=sniff_coli_usage,
    read=read_coli_usage,
)


# -- Performance reports of a llama.cpp fork with a hot cache: llama.cpp.moe_layer_perf.v1 and moe_layer_opt_perf.v1.
# -- `layers[]` has `layer` and, as [expert, count] pairs, `experts`; older ones `hot_experts` and `cold_experts`,
# -- which add up to them. Reports of a run without these counts (`off`, or without expert counts) are refused.

MARK = '"llama.cpp.moe_layer_'
SCHEMAS = ("llama.cpp.moe_layer_perf.v1", "llama.cpp.moe_layer_opt_perf.v1")
WHOLE = Values("iu", 0, MOST_COUNT - 1)
PAIRS = ("experts", "hot_experts", "cold_experts")


def sniff_hot_cache(path: Path) -> bool:
    """Recognise a JSON document that names one of the schemas."""
    return path.is_file() and path.suffix == ".json" and holds(path, MARK)


def read_hot_cache(path: Path) -> Counts:
    """Read the counts of all layers. Raises TraceError naming the layer with invalid counts."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("schema") not in SCHEMAS:
        raise TraceError(f"{path}: invalid schema: expected {' or '.join(SCHEMAS)}, as in a report of that fork")
    layers, experts = document.get("layers"), document.get("n_expert")
    if not isinstance(layers, list) or not layers:
        raise TraceError(
            f"{path}: missing layers, perhaps because counting was off: expected a report with expert counts"
        )
    cells: dict[tuple[int, int], float] = {}
    for index, layer in enumerate(layers):
        cells |= _hot_cells(layer, f"{path}: layers[{index}]")
    return tabulated(path, cells, experts if fits(experts, ids_below(None)._replace(least=1)) else None, ())


def _hot_cells(layer: Any, place: str) -> dict[tuple[int, int], float]:
    """Return the counts of one layer; without `experts`, hot and cold counts are added up."""
    if not isinstance(layer, dict) or not fits(layer.get("layer"), LAYER):
        raise TraceError(f"{place}: missing layer: expected its number, and [expert, count] pairs")
    all_of, *parts = (_pairs(layer.get(key, []), f"{place}.{key}") for key in PAIRS)
    cells: dict[tuple[int, int], float] = {}
    for expert, count in all_of or [pair for part in parts for pair in part]:
        cells[layer["layer"], expert] = cells.get((layer["layer"], expert), 0) + count
    return cells


def _pairs(pairs: Any, place: str) -> list[tuple[int, int]]:
    """Return [expert, count] pairs. Raises TraceError for anything else."""
    if not isinstance(pairs, list):
        raise TraceError(f"{place} is {shown(pairs)}: expected [expert, count] pairs")
    for pair in pairs:
        fine = isinstance(pair, list) and len(pair) == 2 and fits(pair[0], ids_below(None)._replace(least=0))
        if not fine or not fits(pair[1], WHOLE):
            raise TraceError(f"{place} holds {shown(pair)}: expected [expert, count] pairs")
    return [(expert, count) for expert, count in pairs]


HOT_CACHE = Form(
    name="hot_cache",
    summary="reports of a llama.cpp fork with a hot cache of experts",
    formats=f"FILE.json with schema {' or '.join(SCHEMAS)}",
    sniff=sniff_hot_cache,
    read=read_hot_cache,
)


# -- Activation maps: `layers.N.hits`, a count per expert, in one document or a line per domain.
# --     {"index": 0, "domain": "code", "layers": {"0": {"hits": [40, 4, 8, ...]}, "1": {"hits": [...]}}}
# -- The lines are added up. Published with models that were quantised or pruned by them, as tcclaviger's on Hugging
# -- Face.

LOOKED_AT = 1 << 12  #: bytes
HITS = Values("iuf", 0, MOST_COUNT - 1)
MAP_LINE = '{"layers": {"0": {"hits": [a count per expert]}}}'


def sniff_activation_map(path: Path) -> bool:
    """Recognise JSON, or JSON lines, whose first object has layers with hits."""
    if not path.is_file() or suffix_of(path) not in (".json", ".jsonl"):
        return False
    start = start_of(path, LOOKED_AT)
    return b'"layers"' in start and b'"hits"' in start


def read_activation_map(path: Path) -> Counts:
    """Add up all lines. Raises TraceError naming the layer with invalid counts."""
    if suffix_of(path) == ".json":
        document = read_json(path)
        maps = [(str(path), entry) for entry in (document if isinstance(document, list) else [document])]
    else:
        lines = ((at, line) for first, found in blocks(path) for at, line in enumerate(found, first))
        maps = [(f"{path} line {at}", parse_json(line, f"{path} line {at}")) for at, line in lines]
    cells: dict[tuple[int, int], float] = {}
    experts = 0
    for place, entry in maps:
        for layer, hits in _map_layers(entry, place):
            experts = max(experts, len(hits))
            for expert, count in enumerate(hits):
                cells[layer, expert] = cells.get((layer, expert), 0) + count
    domains = sorted({shown(entry["domain"]) for _, entry in maps if isinstance(entry, dict) and "domain" in entry})
    listed = f", of {', '.join(domains[:4])}" if domains else ""
    listed += f" and {len(domains) - 4} more" if len(domains) > 4 else ""
    summed = (f"the sum of {len(maps):,} maps{listed}",) if len(maps) > 1 else ()
    return tabulated(path, cells, experts or None, summed)


def _map_layers(entry: Any, place: str) -> list[tuple[int, list[float]]]:
    """Return layer numbers and their counts."""
    layers = entry.get("layers") if isinstance(entry, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise TraceError(f"{place}: missing layers with hits: expected {MAP_LINE}")
    found = []
    for name, layer in layers.items():
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 6 else -1
        hits = layer.get("hits") if isinstance(layer, dict) else None
        if not fits(number, LAYER) or not isinstance(hits, list) or not 0 < len(hits) <= MOST_EXPERTS:
            raise TraceError(f"{place}: layers.{shown(name)}.hits is {shown(hits)}: expected a count per expert")
        if wrong := [count for count in hits if not fits(count, HITS)]:
            raise TraceError(f"{place}: layers.{number}.hits has {shown(wrong[0])}: expected counts of at least 0")
        found.append((number, hits))
    return found


ACTIVATION_MAP = Form(
    name="activation_map",
    summary="activation maps published with models: a count per layer and expert",
    formats="FILE.json or FILE.jsonl with layers.N.hits [count of each expert]",
    sniff=sniff_activation_map,
    read=read_activation_map,
)


# -- Counts as a table: `layer,expert,count`, or `layer_id,expert_id,count` as SGLang wrote it for each rank until 2025.
# -- A folder holds a file per rank, whose counts are added up. Layers are the model's own numbers.

TABLE_START = re.compile(rb"(layer,expert|layer_id,expert_id),count\r?\n")
LONGEST_TABLE_START = 40  #: bytes


def sniff_count_table(path: Path) -> bool:
    """Recognise CSV files, alone or in a folder, that all begin with these column names."""
    files = files_of(path, ".csv")
    return bool(files) and all(TABLE_START.match(start_of(file, LONGEST_TABLE_START)) for file in files)


def read_count_table(path: Path) -> Counts:
    """Add up the counts of all files. Raises TraceError naming the first invalid line."""
    files = files_of(path, ".csv")
    if not files or not sniff_count_table(path):
        raise TraceError(f"{path}: invalid first line: expected layer,expert,count in every .csv file")
    cells: dict[tuple[int, int], float] = {}
    for file in files:
        for place, count in _table_cells(file).items():
            cells[place] = cells.get(place, 0) + count
    sources.refuse_missing(path, files)
    summed = [f"the sum of {len(files)} files"] if len(files) > 1 else []
    notes = (*summed, *sources.notes(path, files))
    return tabulated(path, cells, None, (*notes, "experts = the highest id + 1"))


def _table_cells(file: Path) -> dict[tuple[int, int], float]:
    table = read_table(file)
    layers, experts, _ = table.columns
    layer = table.checked(LAYER, layers).tolist()
    expert = table.checked(ids_below(None)._replace(least=0), experts).tolist()
    counts = table.checked(COUNT, "count").tolist()
    cells = dict(zip(zip(layer, expert, strict=True), counts, strict=True))
    if len(cells) < len(counts):
        places = np.array([layer, expert]).T
        _, first = np.unique(places, axis=0, return_index=True)
        row = int(np.setdiff1d(np.arange(len(counts)), first)[0])
        where = f"{file} line {table.lines[row]}: layer {layer[row]}, expert {expert[row]}"
        raise TraceError(f"{where} is listed twice: expected each once")
    return cells


COUNT_TABLE = Form(
    name="count_table",
    summary="a table of counts from any program, or SGLang's per rank",
    formats="FILE.csv with layer,expert,count or layer_id,expert_id,count, or a folder of them",
    sniff=sniff_count_table,
    read=read_count_table,
)
