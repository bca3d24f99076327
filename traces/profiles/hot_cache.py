"""Performance reports of a llama.cpp fork with a hot cache: llama.cpp.moe_layer_perf.v1 and moe_layer_opt_perf.v1.

`layers[]` has `layer` and, as [expert, count] pairs, `experts`; older ones `hot_experts` and `cold_experts`, which add
up to them. Reports of a run without these counts (`off`, or without expert counts) are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moereplay.traces.importers.rows import fits
from moereplay.traces.importers.table import LAYER, ids_below
from moereplay.traces.importers.text import holds, read_json
from moereplay.traces.profiles.contract import MOST_COUNT, Counts, Form, tabulated
from moereplay.traces.schema import TraceError, Values, shown

MARK = '"llama.cpp.moe_layer_'
SCHEMAS = ("llama.cpp.moe_layer_perf.v1", "llama.cpp.moe_layer_opt_perf.v1")
COUNT = Values("iu", 0, MOST_COUNT - 1)
PAIRS = ("experts", "hot_experts", "cold_experts")


def sniff(path: Path) -> bool:
    """Recognise a JSON document that names one of the schemas."""
    return path.is_file() and path.suffix == ".json" and holds(path, MARK)


def read(path: Path) -> Counts:
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
        cells |= _cells(layer, f"{path}: layers[{index}]")
    return tabulated(path, cells, experts if fits(experts, ids_below(None)._replace(least=1)) else None, ())


def _cells(layer: Any, place: str) -> dict[tuple[int, int], float]:
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
        if not fine or not fits(pair[1], COUNT):
            raise TraceError(f"{place} holds {shown(pair)}: expected [expert, count] pairs")
    return [(expert, count) for expert, count in pairs]


FORM = Form(
    name="hot_cache",
    summary="reports of a llama.cpp fork with a hot cache of experts",
    formats=f"FILE.json with schema {' or '.join(SCHEMAS)}",
    sniff=sniff,
    read=read,
)
