"""Counts as a table: `layer,expert,count`, or `layer_id,expert_id,count` as SGLang wrote it for each rank until 2025.

A folder holds a file per rank, whose counts are added up. Layers are the model's own numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from moereplay.traces.importers import sources
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.table import COUNT, LAYER, ids_below, read_table
from moereplay.traces.importers.text import start_of
from moereplay.traces.profiles.contract import Counts, Form, tabulated
from moereplay.traces.schema import TraceError

START = re.compile(rb"(layer,expert|layer_id,expert_id),count\r?\n")
LONGEST_START = 40  #: bytes


def sniff(path: Path) -> bool:
    """Recognise CSV files, alone or in a folder, that all begin with these column names."""
    files = files_of(path, ".csv")
    return bool(files) and all(START.match(start_of(file, LONGEST_START)) for file in files)


def read(path: Path) -> Counts:
    """Add up the counts of all files. Raises TraceError naming the first invalid line."""
    files = files_of(path, ".csv")
    if not files or not sniff(path):
        raise TraceError(f"{path}: invalid first line: expected layer,expert,count in every .csv file")
    cells: dict[tuple[int, int], float] = {}
    for file in files:
        for place, count in _cells(file).items():
            cells[place] = cells.get(place, 0) + count
    sources.refuse_missing(path, files)
    summed = [f"the sum of {len(files)} files"] if len(files) > 1 else []
    notes = (*summed, *sources.notes(path, files))
    return tabulated(path, cells, None, (*notes, "experts = the highest id + 1"))


def _cells(file: Path) -> dict[tuple[int, int], float]:
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


FORM = Form(
    name="count_table",
    summary="a table of counts from any program, or SGLang's per rank",
    formats="FILE.csv with layer,expert,count or layer_id,expert_id,count, or a folder of them",
    sniff=sniff,
    read=read,
)
