"""Routing as `llama-moe-trace` of llama.cpp's expert-cache forks writes it: a CSV without a header.

    -2,0,17,3,40,8
    -1,0,9,17,3,22
    ...
    0,0,40,17,3,9

`pos,layer,e0..e{k-1}`: a token at a layer, its experts in rank order. Positions of prompt tokens are negative, -P to
-1; decode steps count from 0. Passes are layer by layer. Files are put end to end to join workloads: where a layer's
position does not rise a request begins. llama.cpp computes the last layer for the last prompt token only; the others
have -1 there. Layers are the model's own numbers. Neither weights nor the number of experts are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import Restarts, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, assumed, header_for
from moereplay.traces.importers.rows import Rows, Seen, requests_in, streamed
from moereplay.traces.importers.table import LAYER, ids_below, tables
from moereplay.traces.importers.text import start_of
from moereplay.traces.schema import TraceError, Values

START = re.compile(rb"-?\d{1,9},\d{1,5},\d{1,5}(,\d{1,5})*\r?\n")
LONGEST_START = 1_024  #: bytes
POSITION = Values("iu", -(2**31), 2**31 - 1)
FORM = "pos,layer,expert,... on every line, numbers only"


def sniff(path: Path) -> bool:
    """A text that begins with a line of at least three whole numbers between commas."""
    return path.is_file() and bool(START.match(start_of(path, LONGEST_START)))


def read(path: Path, options: Options) -> Foreign:
    """A request per workload. Raises TraceError naming the line that is not as documented."""
    if not sniff(path):
        raise TraceError(f"{path}: does not begin with numbers; expected {FORM}")
    seen = Seen(_pieces(path))
    shape = seen.shape(options)
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), _notes(path, seen, shape, options))
    return Foreign(header, requests_in(streamed(path, _pieces(path), seen), header.geometry, options, pruned=True))


def _pieces(path: Path) -> Iterator[Rows]:
    begun = Restarts(repeats=True)
    for table in tables(path, lambda found: found, names=_names):
        position, layer = table.checked(POSITION, "pos"), table.checked(LAYER, "layer")
        ids = table.checked(ids_below(None), *list(table.columns)[2:]).reshape(len(layer), -1)
        phase = (position >= 0).astype(np.int64)
        yield Rows(path, table.lines, begun.add(position, layer), position, layer, ids, phase=phase)


def _names(columns: int) -> tuple[str, ...]:
    if columns < 3:
        raise TraceError(f"{columns} columns; expected {FORM}")
    return ("pos", "layer", *(f"expert {rank}" for rank in range(columns - 2)))


def _notes(path: Path, seen: Seen, shape: Shape, options: Options) -> list[str]:
    how = f"columns are position, layer, then k = {shape.k} experts; a position below 0 is the prompt's"
    begun = f"{len(seen.ends.last):,} requests, a new one where a layer's position does not rise"
    said = renumbering(seen.layers)
    flat = read_flat(
        _first_prompt(next(streamed(path, _pieces(path), seen)), shape.layers), shape.experts or shape.highest_id + 1
    )
    return [assumed([how, begun, *said], shape, options), *([NOTE] if flat else [])]


def _first_prompt(rows: Rows, count: int) -> np.ndarray:
    """(T, L - 1, k) of a request's prompt at all layers but the last of so many."""
    layers = [rows.experts[(rows.token < 0) & (rows.layer == layer)] for layer in range(count - 1)]
    tokens = min((len(each) for each in layers), default=0)
    return np.stack([each[:tokens] for each in layers], 1) if tokens else np.empty((0, 1, 1), np.int64)


# ---------------------------------------------------------------- ids of a strided view that was read flat
# What the recorder took for the chosen experts is whole rankings of all experts.

FEWEST_PER_EXPERT = 8  #: choices of each expert: with fewer, even use may be chance
FEWEST_EXPERTS = 16
SPREAD = 0.25  #: of the mean; of even random choices a layer's most and least used differ by more than the mean
NOTE = "every expert is chosen equally often at each layer, as in no model: a strided view was read flat; record again"


def read_flat(ids: np.ndarray, experts: int) -> bool:
    """Whether the ids (T, L, k) of a prompt are rankings of all experts: each of them as often as any other."""
    routed = ids[(ids >= 0).all((1, 2))]
    return equally_often([np.bincount(routed[:, at].ravel(), minlength=experts) for at in range(routed.shape[1])])


def equally_often(counts: Sequence[np.ndarray]) -> bool:
    """Whether a layer's experts (E,) were chosen about as often as each other, and often enough, at every layer."""
    return all(
        len(each) >= FEWEST_EXPERTS
        and each.sum() >= FEWEST_PER_EXPERT * len(each)
        and float(np.ptp(each)) <= SPREAD * float(each.mean())
        for each in counts
    )


IMPORTER = Importer(
    name="llama_positions",
    summary="llama-moe-trace of llama.cpp's expert-cache forks: ids in rank order, prompt and decode steps",
    formats="FILE.csv without a header: pos,layer,expert,... on every line, positions of the prompt below 0",
    sniff=sniff,
    read=read,
)
