"""Routing as a fork's `moe-trace` example of llama.cpp writes it: `phase,token,layer,rank,expert`, a row per expert.

`phase` is prefill or decode, `token` the position in the one sequence of the file, `rank` the expert's place in the
top-k. Ranks of a token at a layer stand together and count from 0. llama.cpp computes the last layer for the last
prompt token only; the others have -1 there. Layers are the model's own numbers. No weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from traces.importers.cells import number
from traces.importers.contract import Foreign, Importer, Options, Origin, assumed, counted, header_for
from traces.importers.numbering import moe_layers
from traces.importers.rows import Rows, requests_of
from traces.importers.sheet import Sheet, read_sheet
from traces.importers.table import COUNT, LAYER, Table, ids_below
from traces.importers.text import start_of
from traces.schema import TraceError, shown

NAMES = ("phase", "token", "layer", "rank", "expert")
PHASES = {"prefill": 0, "decode": 1}


def sniff(path: Path) -> bool:
    """A text that begins with these names of columns, and no others."""
    start = ",".join(NAMES).encode()
    return path.is_file() and start_of(path, len(start) + 2).splitlines()[:1] == [start]


def read(path: Path, options: Options) -> Foreign:
    """One request. Raises TraceError naming the line that is not as documented."""
    if not sniff(path):
        raise TraceError(f"{path}: does not begin with {','.join(NAMES)}; expected a llama.cpp routing trace")
    sheet = read_sheet(path, lambda found: NAMES)
    rows, said = _rows(path, _table(sheet), _phases(sheet))
    shape = counted(rows.experts, int(rows.layer.max()) + 1, options)
    notes = [assumed(["one request, a row per expert", *said, f"k = {shape.k}"], shape, options)]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes)
    return Foreign(header, requests_of(rows, header.geometry, options, pruned=True))


def _table(sheet: Sheet) -> Table:
    """The columns of numbers."""
    columns = [[number(cell) for cell in sheet.columns[name]] for name in NAMES[1:]]
    for name, cells in zip(NAMES[1:], columns, strict=True):
        if None in cells:
            row = cells.index(None)
            wrong = f"{name} is {shown(repr(sheet.columns[name][row]))}"
            raise TraceError(f"{sheet.place(row)}: {wrong}; expected a whole number")
    return Table(sheet.file, sheet.first, np.array(columns, np.float64).T, NAMES[1:])


def _phases(sheet: Sheet) -> np.ndarray:
    found = [PHASES.get(cell.strip(), -1) for cell in sheet.columns["phase"]]
    if -1 in found:
        row = found.index(-1)
        wrong = shown(repr(sheet.columns["phase"][row]))
        raise TraceError(f"{sheet.place(row)}: phase is {wrong}; expected {' or '.join(PHASES)}")
    return np.array(found, np.int64)


def _rows(path: Path, table: Table, phases: np.ndarray) -> tuple[Rows, list[str]]:
    """A row for every token and layer, its experts by rank."""
    token, rank = table.checked(COUNT, "token"), table.checked(COUNT, "rank")
    layer, said = moe_layers(table.checked(LAYER, "layer"))
    experts = table.checked(ids_below(None), "expert")
    starts = np.flatnonzero(rank == 0)
    k = int(np.diff(np.append(starts, len(rank)))[0]) if len(starts) else 0
    group = np.arange(len(rank)) // max(k, 1)
    same = (rank == np.arange(len(rank)) % max(k, 1)) & _begun(token, group, k) & _begun(layer, group, k)
    if not k or len(rank) % k or not same.all():
        row = int(np.flatnonzero(~same)[0]) if not same.all() else len(rank) - 1
        raise TraceError(
            f"{path} line {table.lines[row]}: rank {rank[row]}; expected ranks 0 to {max(k, 1) - 1} of each token at a "
            "layer, line by line; was the file cut off?"
        )
    first = slice(None, None, k)
    request = np.zeros(len(token[first]), np.int64)
    ids = experts.reshape(-1, k)
    return Rows(path, table.lines[first], request, token[first], layer[first], ids, phase=phases[first]), said


def _begun(values: np.ndarray, group: np.ndarray, k: int) -> np.ndarray:
    """Whether each row (N,) says what the first row of its group of k says."""
    return values == values[group * k]


IMPORTER = Importer(
    name="llama_ranks",
    summary="moe-trace of a llama.cpp fork: ids, prefill and decode, a row per expert",
    formats="FILE.csv with phase,token,layer,rank,expert",
    sniff=sniff,
    read=read,
)
