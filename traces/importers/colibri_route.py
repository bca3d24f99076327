"""The stream that colibri writes with ROUTE_TRACE=FILE: `call row layer id:gate ...`, a line per token and layer.

    0 0 3 17:0.4120 40:0.2211
    0 1 3 9:0.3812 17:0.3011
    1 0 4 22:0.5120 3:0.1820

`call` counts MoE layers as they are computed, `row` the tokens of one call. Experts stand in rank order with the gate
weights that the layer applies, to four digits. A new pass begins where the layer does not ascend; tokens and requests
follow from the passes (`forward_passes.py`). Layers are the model's own numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from traces.importers.contract import Foreign, Importer, Options, Origin, assumed, counted, header_for
from traces.importers.forward_passes import tokens_of
from traces.importers.numbering import moe_layers
from traces.importers.rows import Rows, requests_of
from traces.importers.table import COUNT, LAYER, ids_below
from traces.importers.text import blocks, start_of
from traces.schema import VALUES, TraceError, Values, shown

CHOICE = r"\d{1,6}:\d{1,6}\.\d{1,6}"
LINE = re.compile(rf"(\d{{1,15}}) (\d{{1,15}}) (\d{{1,6}})((?: {CHOICE})+)\s*", re.ASCII)
START = re.compile(rf"\d{{1,15}} \d{{1,15}} \d{{1,6}} {CHOICE}( |\r?\n)".encode())
LONGEST_START = 128  #: bytes
FORM = "`call row layer id:gate id:gate ...` on every line"
DIGITS = "gate weights have four digits, as the recorder writes them"


def sniff(path: Path) -> bool:
    """A text that begins with three numbers and an expert with its weight."""
    return path.is_file() and bool(START.match(start_of(path, LONGEST_START)))


def read(path: Path, options: Options) -> Foreign:
    """A request per prompt and what was decoded after it. Raises TraceError naming the line that is wrong."""
    if not sniff(path):
        raise TraceError(f"{path}: does not begin with numbers as 0 0 3 17:0.4120; expected {FORM}")
    lines, places, ids, weights = _lines(path)
    call, row, number = places.T
    layer, numbered = moe_layers(number)
    _check_rows(path, lines, call, row)
    tokens = tokens_of(layer, call)
    rows = Rows(path, lines, tokens.request, tokens.token, layer, ids, weights=weights, phase=tokens.phase)
    shape = counted(ids, int(layer.max()) + 1, options)
    begun = f"{tokens.requests:,} requests, each a prompt (calls of several rows) and its decode steps"
    notes = [assumed(["one sequence at a time, not a batch", begun, *numbered], shape, options), DIGITS]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes)
    return Foreign(header, requests_of(rows, header.geometry, options))


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Line numbers (N,), call, row and layer (N, 3), ids and weights (N, k)."""
    places, ids, weights = [], [], []
    for number, lines in blocks(path, ended=True):
        for at, line in enumerate(lines, number):
            found = LINE.fullmatch(line)
            choices = [choice.split(":") for choice in found[4].split()] if found else []
            if found is None or len(choices) != len(ids[0] if ids else choices):
                count = f", {len(ids[0])} experts" if ids else ""
                raise TraceError(f"{path} line {at}: {shown(line)!r}; expected {FORM}{count}")
            places.append([int(found[group]) for group in (1, 2, 3)])
            ids.append([int(expert) for expert, _ in choices])
            weights.append([float(weight) for _, weight in choices])
    table = np.array(places), np.array(ids), np.array(weights)
    _check(path, table[0][:, :2], COUNT, "call or row")
    _check(path, table[0][:, 2:], LAYER, "layer")
    _check(path, table[1], ids_below(None), "expert")
    _check(path, table[2], VALUES["weights"], "gate")
    return np.arange(1, len(places) + 1), *table


def _check(path: Path, values: np.ndarray, allowed: Values, name: str) -> None:
    wrong = np.argwhere((values < allowed.least) | (values > allowed.most))
    if len(wrong):
        row, column = wrong[0]
        raise TraceError(f"{path} line {row + 1}: {name} is {values[row, column]}; expected {allowed.expected}")


def _check_rows(path: Path, lines: np.ndarray, call: np.ndarray, row: np.ndarray) -> None:
    """Raises TraceError naming the line whose call or row is not the next one."""
    step = np.diff(call, prepend=call[0] - 1)
    expected = np.where(step == 0, np.concatenate([[0], row[:-1] + 1]), 0)
    wrong = np.flatnonzero((step < 0) | (step > 1) | (row != expected))
    if len(wrong):
        at = wrong[0]
        fix = f"expected row {expected[at]}, and calls one after the other: does the file hold two runs?"
        raise TraceError(f"{path} line {lines[at]}: call {call[at]}, row {row[at]}; {fix}")


IMPORTER = Importer(
    name="colibri_route",
    summary="colibri's ROUTE_TRACE stream: ids in rank order with gate weights",
    formats="FILE with `call row layer id:gate ...` on every line",
    sniff=sniff,
    read=read,
)
