"""Read the plain formats to which any trace can be converted: CSV or JSON lines, one line per request, token and layer.

CSV, the names on the first line, whole numbers except the weights:

    request,token,layer,expert_0..expert_{k-1}[,weight_0..weight_{k-1}][,phase]

JSON lines, one object each, the same keys on every line:

    {"request": 0, "token": 0, "layer": 0, "experts": [5, 1], "weights": [0.6, 0.4], "logits": [...], "phase": 0}

`weights`, `logits` and `phase` are optional. Experts are in rank order, -1 for "not routed"; `logits` are raw, one
per expert. Tokens of a request are consecutive, layers count from 0 over MoE layers only, and every token has a line
for every layer; lines may come in any order. `phase` is 0 for prompt tokens and 1 for decoded ones; without it every
token counts as decoded. Either file may be packed with gzip. Cells of a CSV may stand in quotes, and its last line has
a line end, without which the file may have been cut off. The first line of either may carry the sizes (in CSV after
`# `), with the keys of `Geometry`:

    {"moereplay": {"model": "mine", "layers": 2, "experts": 8, "k": 2, "expert_bytes": [1000, 1000]}}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers import dynande, json_lines, responses
from moereplay.traces.importers.cell_rows import ExactRows
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, phase_note
from moereplay.traces.importers.rows import KEYS, Rows, Seen, requests_in, streamed
from moereplay.traces.importers.table import Names, header_lines, tables
from moereplay.traces.importers.text import blocks, start_of, suffix_of
from moereplay.traces.schema import Geometry, TraceError, shown
from moereplay.traces.stated import KEY, Stated, sizes_in

SUFFIXES = (".csv", ".jsonl")
COMMENT = b"# "
FIX = "; map other column names with --columns token=NAME,layer=NAME,experts=NAME"


def sniff(path: Path) -> bool:
    """Return True for any csv or jsonl file without the beginning of another format or a foreign preamble."""
    if not path.is_file() or suffix_of(path) not in SUFFIXES or json_lines.sniff_tokens(path):
        return False
    if dynande.sniff(path) or responses.has_ids(path):
        return False
    start = start_of(path, len(COMMENT) + 1)
    return not start.startswith(b"#") or start == COMMENT + b"{"


def read(path: Path, options: Options) -> Foreign:
    """Return requests by number. Raises TraceError naming the line that is not as documented."""
    if not path.is_file() or suffix_of(path) not in SUFFIXES:
        raise TraceError(
            f"{path}: invalid suffix: expected a file ending in {' or '.join(SUFFIXES)}, or in either and .gz"
        )
    _, lines = next(blocks(path), (1, [""]))
    said = _metadata(path, lines[0])
    stated = said.geometry if said else None
    skip, experts = (1, stated.experts) if stated else (_header(path), None)
    if next(blocks(path, skip), None) is None:
        raise TraceError(f"{path}: no rows: expected a line per request, token and layer")
    seen = Seen(_pieces(path, skip, experts))
    notes = ["line 1 describes the others: left out"] if skip and not stated else []
    notes += [] if seen.phased else phase_note(options)
    shape = _shape(path, seen, stated)
    origin = Origin(GENERIC.name, path, [path], said and said.model, synthetic=said.synthetic if said else "")
    header = header_for(shape, options, origin, notes)
    return Foreign(header, requests_in(streamed(path, _pieces(path, skip, experts), seen), header.geometry, options))


def _header(path: Path) -> int:
    """Return 1 if the first of JSON lines has not the keys that the second has."""
    if suffix_of(path) == ".csv":
        return 0
    return header_lines(path, lambda keys: ("experts",) if {*KEYS, "experts"} <= {*keys} else ())


def _pieces(path: Path, skip: int, experts: int | None) -> Iterator[Rows]:
    """Return the rows after the first `skip` lines, ids below `experts` if that is known."""
    columns: Names = {}

    def choose(found: tuple[str, ...]) -> list[str]:
        columns.update(_columns(found, suffix_of(path) == ".csv", f"{path} line {skip + 1}"))
        return [name for names in columns.values() for name in names]

    return map(ExactRows(columns, experts).rows, tables(path, choose, skip, alike=True))


def _columns(found: tuple[str, ...], single: bool, place: str) -> Names:
    """Return the columns of each field, a column per number if `single`. Raises TraceError for others than these."""
    columns: Names = {name: (name,) for name in KEYS}
    if single:
        k = sum(name.startswith("expert_") for name in found)
        columns["experts"] = tuple(f"expert_{rank}" for rank in range(max(k, 1)))
        if any(name.startswith("weight_") for name in found):
            columns["weights"] = tuple(f"weight_{rank}" for rank in range(k))
    else:
        columns |= {name: (name,) for name in ("experts", "weights", "logits") if name in found or name == "experts"}
    columns |= {"phase": ("phase",)} if "phase" in found else {}
    known = [name for names in columns.values() for name in names]
    for wrong, names in (("missing", set(known) - set(found)), ("unknown", set(found) - set(known))):
        if names:
            column = f"{'column' if single else 'key'} {', '.join(map(shown, sorted(names)))}"
            raise TraceError(f"{place}: {wrong} {column}: expected {','.join(KEYS)},{known[3]},...{FIX}")
    return columns


def _metadata(path: Path, line: str) -> Stated | None:
    """Return the model's facts from the first line, if it states any."""
    first = line.removeprefix(COMMENT.decode())
    if not first.startswith("{") or f'"{KEY}"' not in first:
        return None
    return sizes_in(first, f"{path} line 1")


def _shape(path: Path, seen: Seen, stated: Geometry | None) -> Shape:
    experts, found = seen.logits or (stated.experts if stated else None), seen.layers
    if found[-1] != len(found) - 1:
        missing = np.setdiff1d(np.arange(len(found)), found)[0]
        raise TraceError(
            f"{path}: rows for layer {found[-1]} but none for {missing}: expected consecutive layers from 0"
        )
    layers = max(len(found), stated.layers if stated else 0)
    sizes = stated.expert_bytes if stated else None
    return Shape(layers, seen.k, seen.highest, experts, sizes, stated)


GENERIC = Importer(
    name="generic",
    summary="the documented plain formats for everything else",
    formats="FILE.csv with request,token,layer,expert_0,... or FILE.jsonl with request, token, layer, experts",
    sniff=sniff,
    read=read,
)
