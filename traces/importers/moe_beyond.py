"""MoE-Beyond's tables: `Layer ID,Batch Number,Token,Activated Expert IDs`, layer by layer, a file per prompt.

`Token` is its text and `Activated Expert IDs` a list in quotes, `"[8, 26, 31]"`, in rank order. Positions are not
written: rows of a layer stand in the order of the text. Other columns, such as the embeddings of tokens, are not read.
A prompt is read whole, nothing is generated: every token is prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from traces.importers import mapping
from traces.importers.columns import rows_of
from traces.importers.contract import Foreign, Importer, Options, Origin, Shape, assumed, header_for
from traces.importers.rows import Rows, requests_of
from traces.importers.sheet import read_sheet
from traces.importers.sources import files_of
from traces.importers.text import start_of
from traces.schema import Geometry, Request, TraceError

LAYER, BATCH, EXPERTS = "Layer ID", "Batch Number", "Activated Expert IDs"
START = f"{LAYER},{BATCH},Token,{EXPERTS}".encode()
POSITION = "position"  #: of a token in its layer, which the file leaves out
COLUMNS: mapping.Columns = {"request": (BATCH,), "token": (POSITION,), "layer": (LAYER,), "experts": (EXPERTS,)}
FORCED = "a whole prompt at a time: every token is prompt"


def sniff(path: Path) -> bool:
    """CSV files, alone or in a folder, that all begin with these names."""
    files = files_of(path, ".csv")
    return bool(files) and all(start_of(file, len(START)) == START for file in files)


def read(path: Path, options: Options) -> Foreign:
    """A request per file, by name, and per batch number. Raises TraceError naming the line that is wrong."""
    files = files_of(path, ".csv")
    if not files:
        raise TraceError(f"{path}: no .csv files; expected columns {START.decode()}")
    rows, said = _rows(files[0])
    others = [] if options.geometry else files[1:]  # whose ids say how many experts there are, if nothing else does
    highest = max(int(each.experts.max()) for each in (rows, *(_rows(file)[0] for file in others)))
    shape = Shape(int(rows.layer.max()) + 1, rows.experts.shape[1], highest, None if options.geometry else highest + 1)
    notes = [assumed(["rows of a layer stand in the order of its tokens", *said], shape, options), FORCED]
    header = header_for(shape, options, Origin(IMPORTER.name, path, files), notes)
    return Foreign(header, _requests(files, header.geometry, options))


def _requests(files: list[Path], geometry: Geometry, options: Options) -> Iterator[Request]:
    for file in files:
        rows, _ = _rows(file)
        found = int(rows.layer.max()) + 1, rows.experts.shape[1]
        if found != (geometry.layers, geometry.k):
            raise TraceError(f"{file}: {found} (layers, k); expected {(geometry.layers, geometry.k)}, as in the first")
        yield from requests_of(rows, geometry, options)


def _rows(file: Path) -> tuple[Rows, list[str]]:
    """All of them prompt, and what was assumed."""
    sheet = read_sheet(file, lambda found: (LAYER, BATCH, EXPERTS))
    seen: Counter[tuple[str, str]] = Counter()
    tokens = []
    for place in zip(sheet.columns[LAYER], sheet.columns[BATCH], strict=True):
        tokens.append(seen[place])
        seen[place] += 1
    rows, said = rows_of(replace(sheet, columns=sheet.columns | {POSITION: tokens}), COLUMNS)
    return replace(rows, phase=np.zeros(len(tokens), np.int64)), said


IMPORTER = Importer(
    name="moe_beyond",
    summary="MoE-Beyond's prompts of DeepSeek-V2-Lite: ids in rank order, a file per prompt",
    formats="FILE.csv with Layer ID,Batch Number,Token,Activated Expert IDs, or a folder of them",
    sniff=sniff,
    read=read,
)
