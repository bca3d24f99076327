"""Logs without a token column: rows in the order of computation, each with its layer.

    layer,expert            as llama.cpp's `moe-trace` (pull request 28544) writes it: a row per expert
    layer_id,expert_ids     as a logging llama-server writes it: a row per token, `3,52 40 85`

Tokens follow from the order (`forward_passes.py`). Rows of one expert each are as many per token as the model named by
`--model` routes to; else as the shortest run of one layer has, which a decode step shows.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from traces.importers.cells import numbers, whole
from traces.importers.contract import Foreign, Importer, Options, Origin, assumed, counted, header_for
from traces.importers.forward_passes import Tokens, runs_of, tokens_of
from traces.importers.numbering import moe_layers
from traces.importers.rows import Rows, requests_of
from traces.importers.sheet import read_sheet
from traces.importers.strided import NOTE, read_flat
from traces.importers.table import LAYER, ids_below, read_table
from traces.importers.text import start_of
from traces.schema import TraceError, shown

SINGLE, LISTS = ("layer", "expert"), ("layer_id", "expert_ids")
START = re.compile(rb"(layer,expert|layer_id,expert_ids)\r?\n")
LONGEST_START = 32  #: bytes
LONE_LAYER = "one layer alone shows no passes: every row counts as a decoded token"


def sniff(path: Path) -> bool:
    """A text that begins with either pair of names."""
    return path.is_file() and bool(START.match(start_of(path, LONGEST_START)))


def read(path: Path, options: Options) -> Foreign:
    """A request per prompt and what was decoded after it. Raises TraceError naming the line that is wrong."""
    found = START.match(start_of(path, LONGEST_START)) if path.is_file() else None
    if found is None:
        raise TraceError(f"{path}: does not begin with {','.join(SINGLE)} or {','.join(LISTS)}; expected a layer log")
    single = found[1].decode() == ",".join(SINGLE)
    lines, number, ids, said = _single(path, options) if single else _lists(path)
    layer, numbered = moe_layers(number)
    tokens, read_as = _tokens(layer)
    rows = Rows(path, lines, tokens.request, tokens.token, layer, ids, phase=tokens.phase)
    shape = counted(ids, int(layer.max()) + 1, options)
    notes = [assumed([*read_as, *numbered, said], shape, options)]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes + _flat(rows, shape.highest_id + 1))
    return Foreign(header, requests_of(rows, header.geometry, options, pruned=True))


def _tokens(layer: np.ndarray) -> tuple[Tokens, list[str]]:
    """Where each row belongs, and what was assumed."""
    if layer.max() == 0:
        rows = np.arange(len(layer))
        return Tokens(np.zeros_like(rows), rows, np.ones_like(rows)), [LONE_LAYER]
    tokens = tokens_of(layer, runs_of(layer))
    begun = f"{tokens.requests:,} requests, each a prompt (passes of several tokens) and its decode steps"
    return tokens, ["rows are in the order of computation, pass by pass", begun]


def _single(path: Path, options: Options) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Lines (N,), layers (N,) and ids (N, k) of tokens whose experts have a row each, and what was assumed of k."""
    table = read_table(path, 0, SINGLE)
    layer, expert = table.checked(LAYER, "layer"), table.checked(ids_below(None), "expert")
    lengths = np.bincount(runs_of(layer))
    # the last run may have been cut off, and then says nothing of k
    k = options.geometry.k if options.geometry else math.gcd(*(lengths[:-1] if len(lengths) > 1 else lengths).tolist())
    wrong = np.flatnonzero(lengths % k)
    if len(wrong):
        row = int(lengths[: wrong[0]].sum())
        found = f"{lengths[wrong[0]]} rows of layer {layer[row]} begin here, not {k} per token"
        raise TraceError(f"{path} line {table.lines[row]}: {found}; was it cut off, or is it another model's?")
    how = f"as {options.model or 'the geometry given'} has" if options.geometry else "the most that divides every run"
    first = slice(None, None, k)
    return table.lines[first], layer[first], expert.reshape(-1, k), f"k = {k}, {how}"


def _lists(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """The same of lists of ids."""
    sheet = read_sheet(path, lambda found: LISTS)
    layers, ids = [], []
    for row, (layer, cell) in enumerate(zip(*(sheet.columns[name] for name in LISTS), strict=True)):
        found, chosen = whole(layer), numbers(cell)
        if found is None or not _within([found], LAYER.most):
            raise TraceError(f"{sheet.place(row)}: layer_id is {shown(repr(layer))}; expected {LAYER.expected}")
        if not chosen or not _within(chosen, ids_below(None).most) or (ids and len(chosen) != len(ids[0])):
            count = len(ids[0]) if ids else "some"
            raise TraceError(f"{sheet.place(row)}: expert_ids is {shown(repr(cell))}; expected {count} ids")
        layers.append(found)
        ids.append(chosen)
    lines = sheet.first + np.arange(len(layers))
    return lines, np.array(layers, np.int64), np.array(ids, np.int64), f"k = {len(ids[0])}"


def _within(values: list[float], most: float) -> bool:
    return all(isinstance(value, int) and 0 <= value <= most for value in values)


def _flat(rows: Rows, experts: int) -> list[str]:
    """What is said of the first layer's prompt tokens if no router chose them."""
    prompt = rows.experts[(rows.layer == 0) & (rows.phase == 0)] if rows.phase is not None else rows.experts[:0]
    return [NOTE] if read_flat(prompt[:, None], experts) else []


IMPORTER = Importer(
    name="layer_log",
    summary="logs of llama.cpp without tokens: layers and ids in the order of computation",
    formats="FILE.csv or .log with layer,expert (a row per expert) or layer_id,expert_ids (`3,52 40 85`)",
    sniff=sniff,
    read=read,
)
