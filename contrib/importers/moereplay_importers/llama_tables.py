"""CSV of `moe-trace` programs of llama.cpp forks: a row per token and layer, or per rank of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import Columns, Restarts, joined, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.rows import Rows, Seen, emptied, requests_in, streamed
from moereplay.traces.importers.table import COUNT, LAYER, Table, ids_below, tables
from moereplay.traces.importers.text import start_of
from moereplay.traces.schema import MOST_EXPERTS, TraceError, Values
from moereplay.traces.texts import counted
from moereplay_importers.by_pass import in_groups

POSITIONS_START = re.compile(rb"-?\d{1,9},\d{1,5},\d{1,5}(,\d{1,5})*\r?\n")
LONGEST_POSITIONS_START = 1_024  #: bytes
POSITION = Values("iu", -(2**31), 2**31 - 1)
FORM = "pos,layer,expert,... on every line, numbers only"


def sniff_positions(path: Path) -> bool:
    """Return True for a text that begins with a line of at least three whole numbers between commas."""
    return path.is_file() and bool(POSITIONS_START.match(start_of(path, LONGEST_POSITIONS_START)))


def read_positions(path: Path, options: Options) -> Foreign:
    """Read the CSV without a header that `llama-moe-trace` of llama.cpp's expert-cache forks writes.

        -2,0,17,3,40,8
        -1,0,9,17,3,22
        ...
        0,0,40,17,3,9

    `pos,layer,e0..e{k-1}`: a token at a layer, its experts in rank order. Positions of prompt tokens are negative,
    -P to -1; decode steps count from 0. Passes are layer by layer. Files are put end to end to join workloads:
    where a layer's position does not rise a request begins. llama.cpp computes the last layer for the last prompt
    token only; the others have -1 there. Layers are the model's own numbers. Neither weights nor the number of
    experts are recorded.

    Return a request per workload. Raises TraceError naming the line that is not as documented.
    """
    if not sniff_positions(path):
        raise TraceError(f"{path}: invalid first line: expected {FORM}")
    seen = Seen(_positions(path))
    shape = seen.shape(options)
    header = header_for(shape, options, Origin(LLAMA_POSITIONS.name, path, [path]), _notes(path, seen, shape, options))
    return Foreign(header, requests_in(streamed(path, _positions(path), seen), header.geometry, options, pruned=True))


def _positions(path: Path) -> Iterator[Rows]:
    begun = Restarts(repeats=True)
    for table in tables(path, lambda found: found, names=_names):
        position, layer = table.checked(POSITION, "pos"), table.checked(LAYER, "layer")
        ids = table.checked(ids_below(None), *list(table.columns)[2:]).reshape(len(layer), -1)
        phase = (position >= 0).astype(np.int64)
        yield Rows(path, table.lines, begun.add(position, layer), position, layer, ids, phase=phase)


def _names(columns: int) -> tuple[str, ...]:
    if columns < 3:
        raise TraceError(f"{columns} columns: expected {FORM}")
    return ("pos", "layer", *(f"expert {rank}" for rank in range(columns - 2)))


def _notes(path: Path, seen: Seen, shape: Shape, options: Options) -> list[str]:
    how = f"columns are position, layer, then k = {shape.k} experts; positions below 0 belong to the prompt"
    begun = f"{counted(len(seen.ends.last), 'request')}, starting where a layer's position does not rise"
    said = renumbering(seen.layers)
    first = first_prompt(next(streamed(path, _positions(path), seen)), shape.layers - 1)
    flat = read_flat(first, shape.experts or shape.highest_id + 1)
    return [options.assumed([how, begun, *said], shape), *([NOTE] if flat else [])]


def first_prompt(rows: Rows, count: int) -> np.ndarray:
    """Return ids (T, L, k) of a request's prompt at the first `count` layers."""
    layers = [rows.experts[(rows.phase == 0) & (rows.layer == layer)] for layer in range(count)]
    tokens = min((len(each) for each in layers), default=0)
    return np.stack([each[:tokens] for each in layers], 1) if tokens else np.empty((0, 1, 1), np.int64)


# ---------------------------------------------------------------- ids of a strided view that was read flat
# What the recorder took for the chosen experts is whole rankings of all experts.

FEWEST_PER_EXPERT = 8  #: choices of each expert: with fewer, even use may be chance
FEWEST_EXPERTS = 16
SPREAD = 0.25  #: of the mean; of even random choices a layer's most and least used differ by more than the mean
NOTE = (
    "every expert is chosen equally often at each layer, which no model does: a strided view was probably "
    "read as flat; record it again"
)


def read_flat(ids: np.ndarray, experts: int) -> bool:
    """Return whether the ids (T, L, k) of a prompt are rankings of all experts: each as often as any other."""
    routed = ids[(ids >= 0).all((1, 2))]
    return equally_often([np.bincount(routed[:, at].ravel(), minlength=experts) for at in range(routed.shape[1])])


def equally_often(counts: Sequence[np.ndarray]) -> bool:
    """Return True if every layer's experts (E,) were chosen about equally often, with enough choices to decide."""
    return all(
        len(each) >= FEWEST_EXPERTS
        and each.sum() >= FEWEST_PER_EXPERT * len(each)
        and float(np.ptp(each)) <= SPREAD * float(each.mean())
        for each in counts
    )


LLAMA_POSITIONS = Importer(
    name="llama_positions",
    summary="llama-moe-trace of llama.cpp's expert-cache forks: ids in rank order, prompt and decode steps",
    formats="FILE.csv without a header: pos,layer,expert,... on every line, positions of the prompt below 0",
    sniff=sniff_positions,
    read=read_positions,
)


# ---------------------------------------------------------------- a row per rank

NAMES = ("phase", "token", "layer", "rank", "expert")
PHASES = {"prefill": 0, "decode": 1}


def sniff_ranks(path: Path) -> bool:
    """Return True for a text that begins with these names of columns, and no others."""
    start = ",".join(NAMES).encode()
    return path.is_file() and start_of(path, len(start) + 2).splitlines()[:1] == [start]


def read_ranks(path: Path, options: Options) -> Foreign:
    """Read the output of `moe-trace` in a llama.cpp fork: `phase,token,layer,rank,expert`, a row per expert.

    `phase` is prefill or decode, `token` the position in the one sequence of the file, `rank` the expert's place in
    the top-k. Ranks of a token at a layer are consecutive and count from 0. llama.cpp computes the last layer for
    the last prompt token only; the others have -1 there. Layers are the model's own numbers. No weights.

    Return one request. Raises TraceError naming the line that is not as documented.
    """
    if not sniff_ranks(path):
        raise TraceError(f"{path}: invalid first line: expected {','.join(NAMES)}, as in a llama.cpp routing trace")
    held = [rows.narrowed() for rows in _ranks(path)]  # all of one request
    seen = Seen(held, keep=False)
    shape = seen.shape(options)
    notes = [options.assumed(["one request, a row per expert", *renumbering(seen.layers), f"k = {shape.k}"], shape)]
    header = header_for(shape, options, Origin(LLAMA_RANKS.name, path, [path]), notes)
    return Foreign(header, requests_in(streamed(path, emptied(held), seen), header.geometry, options, pruned=True))


def _ranks(path: Path) -> Iterator[Rows]:
    """Yield a row for every token and layer, its experts by rank."""
    found = map(_columns, tables(path, lambda found: NAMES))
    first = next(found)
    while len(first["rank"]) < MOST_EXPERTS and (first["rank"] == 0).sum() < 2 and (more := next(found, None)):
        first = joined([first, more])
    begins = np.flatnonzero(first["rank"] == 0)
    k = int(np.diff(np.append(begins, len(first["rank"])))[0]) if len(begins) else 1
    for columns in in_groups(chain([first], found), k):
        _check_ranks(path, columns, k)
        token, layer, phase, lines = (columns[name][::k] for name in ("token", "layer", "phase", "lines"))
        ids = columns["expert"].reshape(-1, k)
        yield Rows(path, lines, np.zeros_like(token), token, layer, ids, phase=phase)


def _columns(table: Table) -> Columns:
    """Return the numbers of some rows, by column."""
    allowed = {"token": COUNT, "layer": LAYER, "rank": COUNT, "expert": ids_below(None)}
    numbers = {name: table.checked(each, name) for name, each in allowed.items()}
    phase = [PHASES.get(str(cell).strip(), -1) for cell in table.columns["phase"]]
    if -1 in phase:
        row = phase.index(-1)
        raise table.misfit(row, "phase", table.columns["phase"][row], " or ".join(PHASES))
    return numbers | {"phase": np.array(phase, np.int64), "lines": table.lines}


def _check_ranks(path: Path, columns: Columns, k: int) -> None:
    """Raises TraceError naming the line whose rank is not the next one of its token at its layer."""
    rank, group = columns["rank"], np.arange(len(columns["rank"])) // k * k
    same = rank == np.arange(len(rank)) - group
    for name in ("token", "layer"):
        same &= columns[name] == columns[name][group]
    if len(rank) % k or not same.all():
        row = int(np.flatnonzero(~same)[0]) if not same.all() else len(rank) - 1
        raise TraceError(
            f"{path} line {columns['lines'][row]}: invalid rank {rank[row]}: expected 0 to {k - 1} of each token at a "
            "layer, in order; the file may be truncated"
        )


LLAMA_RANKS = Importer(
    name="llama_ranks",
    summary="moe-trace of a llama.cpp fork: ids, prefill and decode, a row per expert",
    formats="FILE.csv with phase,token,layer,rank,expert",
    sniff=sniff_ranks,
    read=read_ranks,
)
