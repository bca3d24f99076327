"""MoE-Beyond's tables: `Layer ID,Batch Number,Token,Activated Expert IDs`, layer by layer, a file per prompt.

`Token` is the token's text and `Activated Expert IDs` a list in quotes, `"[8, 26, 31]"`, in rank order. Positions are
not recorded: the rows of a layer are in the order of the text. Other columns, such as the embeddings of tokens, are
not read. Nothing is generated: every token is prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.columns import CellRows
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.rows import Rows, Seen, emptied, requests_in, streamed
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import Names, Table, tables
from moereplay.traces.importers.text import start_of, whole
from moereplay.traces.schema import Geometry, Request, TraceError

LAYER, BATCH, EXPERTS = "Layer ID", "Batch Number", "Activated Expert IDs"
START = f"{LAYER},{BATCH},Token,{EXPERTS}".encode()
POSITION = "position"  #: of a token in its layer, which the file leaves out
COLUMNS: Names = {"request": (BATCH,), "token": (POSITION,), "layer": (LAYER,), "experts": (EXPERTS,)}
FORCED = "a whole prompt at a time: every token is prompt"


def sniff(path: Path) -> bool:
    """Return True for CSV files, alone or in a folder, that all begin with these names."""
    files = files_of(path, ".csv")
    return bool(files) and all(start_of(file, len(START)) == START for file in files)


def read(path: Path, options: Options) -> Foreign:
    """Return a request per file, by name, and per batch number. Raises TraceError naming the line that is wrong."""
    files = files_of(path, ".csv")
    if not files:
        raise TraceError(f"{path}: missing .csv files: expected columns {START.decode()}")
    first = _File(files[0])
    others = [] if options.geometry else files[1:]  # whose ids say how many experts there are, if nothing else does
    highest = max(first.seen.highest, *(_File(file).seen.highest for file in others), -1)
    shape = options.shape_of(len(first.seen.layers), first.seen.k, highest)
    notes = [options.assumed(["rows of a layer stand in the order of its tokens", *first.said()], shape), FORCED]
    header = header_for(shape, options, Origin(MOE_BEYOND.name, path, files), notes)
    return Foreign(header, _requests(files, header.geometry, options))


def _requests(files: list[Path], geometry: Geometry, options: Options) -> Iterator[Request]:
    for file in files:
        one = _File(file)
        found = len(one.seen.layers), one.seen.k
        if found != (geometry.layers, geometry.k):
            raise TraceError(f"{file}: {found} (layers, k): expected {(geometry.layers, geometry.k)}, as in the first")
        yield from requests_in(streamed(file, emptied(one.rows), one.seen), geometry, options)


class _File:
    """The rows of one file, held in memory because prompts written layer by layer end together."""

    def __init__(self, file: Path) -> None:
        """Raises TraceError naming the line that is wrong."""
        self.cells = CellRows(COLUMNS)
        found = [self.cells.rows(table) for table in _with_positions(file)]
        numbers = self.cells.numbers
        self.rows = [_prompt(rows, numbers) for rows in found]
        self.seen = Seen(self.rows, keep=False)

    def said(self) -> list[str]:
        """Describe the assumptions."""
        requests = self.cells.said(len(self.seen.ends.last))
        return [*requests, *renumbering(self.seen.layers), self.cells.width(self.seen.k)]


def _prompt(rows: Rows, numbers: np.ndarray | None) -> Rows:
    """Mark all rows as prompt, and number requests if all have a number."""
    request = rows.request if numbers is None else numbers[rows.request]
    return replace(rows, request=request, phase=np.zeros(len(rows.token), np.int8)).narrowed()


def _with_positions(file: Path) -> Iterator[Table]:
    """Yield the tables of a file, with the position of every token in its layer and batch."""
    seen: Counter[tuple[int | None, str]] = Counter()
    for table in tables(file, lambda found: (LAYER, BATCH, EXPERTS)):
        tokens = []
        for layer, batch in zip(table.columns[LAYER], table.columns[BATCH], strict=True):
            place = whole(layer), str(batch)
            tokens.append(seen[place])
            seen[place] += 1
        yield replace(table, columns={**table.columns} | {POSITION: tokens})


MOE_BEYOND = Importer(
    name="moe_beyond",
    summary="MoE-Beyond's prompts of DeepSeek-V2-Lite: ids in rank order, a file per prompt",
    formats="FILE.csv with Layer ID,Batch Number,Token,Activated Expert IDs, or a folder of them",
    sniff=sniff,
    read=read,
)
