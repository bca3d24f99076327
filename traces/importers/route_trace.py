"""BigMoeOnEdge `# route_trace v1`: a preamble with the bytes of one expert and of dense weights per layer, then rows.

A row is a routed expert.

Columns are read by name: `turn,phase,step,layer,slot,expert` are needed, `weight`, `residency`, `dropped` may follow.
A turn is a request, `step` the absolute position, phase 0 its prompt. Layers are the model's own numbers; those
without rows are dense and left out. Cells without a line, or with expert -1, were not routed: llama.cpp computes the
last layer for the last prompt token only. So the last token of every turn has all its rows, or the file was cut off. A
dropped expert was routed but never read: it stays among the chosen. The file may be packed with gzip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from moereplay.traces.importers.by_request import (
    CHANGED,
    REQUEST,
    Columns,
    Ends,
    Grid,
    Keys,
    by_request,
    grids,
    prompt_of,
)
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.table import COUNT, LAYER, Table, ids_below, tables
from moereplay.traces.importers.text import first_lines, start_of
from moereplay.traces.schema import MOST_LAYERS, VALUES, Request, TraceError, Values, shown

MAGIC = "# route_trace"
VERSION = "v1"
NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
OPTIONAL = ("weight", "residency", "dropped")
FLAG = Values("iu", 0, 1)
MOST_PREAMBLE = MOST_LAYERS + 64  #: lines
LONGEST_FACTS = 8_192  #: characters of the line that names the model
DIGITS = r"(\d{1,18})\b"
SIZES = f"# layer={DIGITS} expert_bytes={DIGITS}(?: dense_bytes={DIGITS})?"
FEWEST_ROUTED = 16  #: at least one in this many cells has a row


@dataclass(frozen=True)
class Preamble:
    """The static facts of a run; bytes by the model's layer number."""

    model: str
    experts: int
    k: int
    expert_bytes: dict[int, int]
    dense_bytes: dict[int, int]  #: of everything else in the layer; without those that do not say it


def sniff(path: Path) -> bool:
    """Return True for a file that begins with the format's name."""
    return path.is_file() and start_of(path, len(MAGIC)) == MAGIC.encode()


def read(path: Path, options: Options) -> Foreign:
    """Return a request per turn, with gate weights and residency. Raises TraceError naming the line that is wrong."""
    if not sniff(path):
        raise TraceError(f"{path}: invalid first line: expected {MAGIC!r}, as in a BigMoeOnEdge route trace")
    lines = first_lines(path, "#", MOST_PREAMBLE)
    preamble = _preamble(path, lines)
    seen = _Seen(_pieces(path, len(lines), preamble.experts))
    shape = _shape(preamble, seen, path)
    dense = len(preamble.expert_bytes) - len(seen.layers)
    notes = [f"{dense} layers of the preamble have no rows (dense): left out"] if dense > 0 else []
    notes += ["weights left out: the recorder did not see all of them"] if seen.weightless else []
    notes += [f"{seen.dropped} experts were dropped by the recorder's policy; kept among the chosen"] * (
        seen.dropped > 0
    )
    header = header_for(shape, options, Origin(ROUTE_TRACE.name, path, [path], model=preamble.model), notes)
    turns = by_request(map(seen.kept, _pieces(path, len(lines), preamble.experts)), seen.ends, str(path))
    return Foreign(header, _requests(path, turns, shape, seen.layers, options))


def _pieces(path: Path, skip: int, experts: int) -> Iterator[Columns]:
    """Yield rows by column, in pieces, after the given number of lines."""
    for table in tables(path, lambda found: (*NEEDED, *(name for name in OPTIONAL if name in found)), skip):
        yield _columns(table, experts)


class _Seen:
    """Facts that a first reading finds."""

    def __init__(self, pieces: Iterable[Columns]) -> None:
        self.ends = Ends()
        self.layers = np.zeros(0, np.int64)  #: (L,) the model's numbers, rising
        self.slots, self.highest, self.dropped = 0, -1, 0
        self.weightless = False  #: whether some weights could not be seen
        for columns in pieces:
            self.ends.add(columns[REQUEST])
            self.layers = np.union1d(self.layers, columns["layer"])
            self.slots = max(self.slots, int(columns["slot"].max()) + 1)
            self.highest = max(self.highest, int(columns["expert"].max()))
            self.dropped += int(columns["dropped"].sum()) if "dropped" in columns else 0
            self.weightless |= "unseen" in columns

    def kept(self, columns: Columns) -> Columns:
        """Return the columns that a trace has."""
        left = {"dropped", "unseen", *(["weight"] if self.weightless else [])}
        return {name: values for name, values in columns.items() if name not in left}


def _preamble(path: Path, lines: list[str]) -> Preamble:
    if lines[0].split()[-1] != VERSION:
        raise TraceError(f"{path} line 1: invalid preamble {shown(lines[0])!r}: expected '{MAGIC} {VERSION}'")
    told = next((line for line in lines if line.startswith("# model=")), "")[:LONGEST_FACTS]
    facts = re.match(rf"# model=(.*) arch=.* n_expert={DIGITS} n_expert_used={DIGITS}", told, re.ASCII)
    sizes = [found.groups() for line in lines if (found := re.match(SIZES, line, re.ASCII))]
    if facts is None:
        raise TraceError(f"{path} line 2: expected '# model=... arch=... n_layer=... n_expert=... n_expert_used=...'")
    # the recorder writes its own absolute path
    model = PurePath(facts[1]).name
    experts = {int(layer): int(size) for layer, size, _ in sizes}
    dense = {int(layer): int(size) for layer, _, size in sizes if size}
    return Preamble(model, int(facts[2]), int(facts[3]), experts, dense)


def _shape(preamble: Preamble, seen: _Seen, path: Path) -> Shape:
    layers = seen.layers.tolist()
    if silent := {layer for layer, size in preamble.expert_bytes.items() if size} - set(layers):
        raise TraceError(
            f"{path}: layer {min(silent)} has experts but no rows; the file may be truncated: record it again"
        )
    if seen.slots != preamble.k:
        raise TraceError(
            f"{path}: {seen.slots} slots per token: expected {preamble.k}, the n_expert_used of the preamble"
        )
    sizes = tuple(preamble.expert_bytes.get(layer, 0) for layer in layers)
    dense = [preamble.dense_bytes.get(layer, 0) for layer in layers]
    dense[0] += sum(size for layer, size in preamble.dense_bytes.items() if layer not in layers)  # read once as well
    return Shape(
        layers=len(sizes),
        k=seen.slots,
        highest_id=seen.highest,
        experts=preamble.experts,
        expert_bytes=sizes if all(sizes) else None,
        dense_bytes=tuple(dense) if all(dense) else None,
    )


def _columns(table: Table, experts: int) -> Columns:
    """Return the columns that are used, by name; rows with expert -1 weigh 0 and have no residency.

    Turns are requests. `unseen` replaces the weights if one of them was not seen.
    """
    allowed = {"turn": COUNT, "phase": FLAG, "step": COUNT, "layer": LAYER, "slot": COUNT, "expert": ids_below(experts)}
    columns = {name: table.checked(allowed[name], name) for name in NEEDED}
    columns |= {REQUEST: columns.pop("turn"), "lines": table.lines}
    routed = columns["expert"] >= 0
    if "weight" in table and np.isnan(table.numeric("weight")[routed]).any():
        columns["unseen"] = routed
    elif "weight" in table:
        columns["weight"] = np.where(routed, table.checked(VALUES["weights"], "weight", among=routed), 0)
    if "residency" in table:
        columns["residency"] = np.where(routed, table.checked(VALUES["residency"], "residency"), -1)
    if "dropped" in table:
        columns["dropped"] = table.checked(FLAG, "dropped")
    return columns


def _requests(
    path: Path, turns: Iterable[Columns], shape: Shape, layers: np.ndarray, options: Options
) -> Iterator[Request]:
    place, width = str(path), shape.layers * shape.k
    for columns in turns:
        cell = np.searchsorted(layers, columns["layer"]) * shape.k + columns["slot"]
        if cell.max() >= width:
            raise TraceError(f"{path}: {CHANGED}")
        for grid in grids(Keys(columns[REQUEST], columns["step"], cell, width, columns["lines"], place)):
            _refuse_cut(grid, place)
            cells = (grid.tokens, shape.layers, shape.k)
            fills = {"weights": ("weight", 0), "residency": ("residency", -1)}
            more = {
                array: grid.dense(columns[name], fill).reshape(cells)
                for array, (name, fill) in fills.items()
                if name in columns
            }
            # layers may lack rows, so a token's phase is the largest any of its rows gives
            prompt = prompt_of(grid.dense(columns["phase"], -1).max(1), grid.request, place)
            chosen = grid.dense(columns["expert"], -1).reshape(cells)
            yield Request(chosen, options.prompt_of(grid.tokens, prompt), **more)


def _refuse_cut(grid: Grid, place: str) -> None:
    """Refuse missing rows before a dense array is made: a few rows may name many cells."""
    last = int((grid.cells >= (grid.tokens - 1) * grid.width).sum())
    if last < grid.width:
        where = f"turn {grid.request}: its last token, step {grid.first_token + grid.tokens - 1}"
        raise TraceError(
            f"{place}: {where}, has {last} rows of {grid.width}; the file may be truncated: remove this turn"
        )
    if len(grid.cells) * FEWEST_ROUTED < grid.tokens * grid.width:
        cells = f"{grid.tokens * grid.width:,} cells of token, layer and slot"
        raise TraceError(f"{place}: turn {grid.request}: {len(grid.cells):,} rows for {cells}: expected most of them")


ROUTE_TRACE = Importer(
    name="route_trace",
    summary="BigMoeOnEdge runs on a phone: ids, gate weights, sizes per layer, real residency",
    formats="FILE.csv that begins with '# route_trace v1'",
    sniff=sniff,
    read=read,
)
