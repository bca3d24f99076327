"""Activation maps: `layers.N.hits`, a count per expert, in one document or a line per domain.

    {"index": 0, "domain": "code", "layers": {"0": {"hits": [40, 4, 8, ...]}, "1": {"hits": [...]}}}

The lines are added up. Published with models that were quantised or pruned by them, as tcclaviger's on Hugging Face.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moereplay.traces.importers.rows import fits
from moereplay.traces.importers.table import LAYER
from moereplay.traces.importers.text import blocks, parse_json, read_json, start_of, suffix_of
from moereplay.traces.profiles.contract import MOST_COUNT, Counts, Form, tabulated
from moereplay.traces.schema import MOST_EXPERTS, TraceError, Values, shown

LOOKED_AT = 1 << 12  #: bytes
COUNT = Values("iuf", 0, MOST_COUNT - 1)
FORM_LINE = '{"layers": {"0": {"hits": [a count per expert]}}}'


def sniff(path: Path) -> bool:
    """Recognise JSON, or JSON lines, whose first object has layers with hits."""
    if not path.is_file() or suffix_of(path) not in (".json", ".jsonl"):
        return False
    start = start_of(path, LOOKED_AT)
    return b'"layers"' in start and b'"hits"' in start


def read(path: Path) -> Counts:
    """Add up all lines. Raises TraceError naming the layer with invalid counts."""
    if suffix_of(path) == ".json":
        document = read_json(path)
        maps = [(str(path), each) for each in (document if isinstance(document, list) else [document])]
    else:
        lines = ((at, line) for first, found in blocks(path) for at, line in enumerate(found, first))
        maps = [(f"{path} line {at}", parse_json(line, f"{path} line {at}")) for at, line in lines]
    cells: dict[tuple[int, int], float] = {}
    experts = 0
    for place, each in maps:
        for layer, hits in _layers(each, place):
            experts = max(experts, len(hits))
            for expert, count in enumerate(hits):
                cells[layer, expert] = cells.get((layer, expert), 0) + count
    summed = (f"the sum of {len(maps):,} maps{_domains(maps)}",) if len(maps) > 1 else ()
    return tabulated(path, cells, experts or None, summed)


def _layers(each: Any, place: str) -> list[tuple[int, list[float]]]:
    """Return layer numbers and their counts."""
    layers = each.get("layers") if isinstance(each, dict) else None
    if not isinstance(layers, dict) or not layers:
        raise TraceError(f"{place}: missing layers with hits: expected {FORM_LINE}")
    found = []
    for name, layer in layers.items():
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 6 else -1
        hits = layer.get("hits") if isinstance(layer, dict) else None
        if not fits(number, LAYER) or not isinstance(hits, list) or not 0 < len(hits) <= MOST_EXPERTS:
            raise TraceError(f"{place}: layers.{shown(name)}.hits is {shown(hits)}: expected a count per expert")
        if wrong := [count for count in hits if not fits(count, COUNT)]:
            raise TraceError(f"{place}: layers.{number}.hits has {shown(wrong[0])}: expected counts of at least 0")
        found.append((number, hits))
    return found


def _domains(maps: list[tuple[str, Any]]) -> str:
    names = sorted({shown(each["domain"]) for _, each in maps if isinstance(each, dict) and "domain" in each})
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f", of {', '.join(names[:4])}{more}" if names else ""


FORM = Form(
    name="activation_map",
    summary="activation maps published with models: a count per layer and expert",
    formats="FILE.json or FILE.jsonl with layers.N.hits [count of each expert]",
    sniff=sniff,
    read=read,
)
