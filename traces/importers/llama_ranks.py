"""Routing as a fork's `moe-trace` example of llama.cpp writes it: `phase,token,layer,rank,expert`, a row per expert.

`phase` is prefill or decode, `token` the position in the one sequence of the file, `rank` the expert's place in the
top-k. Ranks of a token at a layer stand together and count from 0. llama.cpp computes the last layer for the last
prompt token only; the others have -1 there. Layers are the model's own numbers. No weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import Columns, in_groups, joined, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, assumed, header_for
from moereplay.traces.importers.rows import Rows, Seen, emptied, requests_in, streamed
from moereplay.traces.importers.table import COUNT, LAYER, Table, ids_below, tables
from moereplay.traces.importers.text import start_of
from moereplay.traces.schema import MOST_EXPERTS, TraceError

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
    held = [rows.narrowed() for rows in _pieces(path)]  # all of one request
    seen = Seen(held, keep=False)
    shape = seen.shape(options)
    notes = [assumed(["one request, a row per expert", *renumbering(seen.layers), f"k = {shape.k}"], shape, options)]
    header = header_for(shape, options, Origin(IMPORTER.name, path, [path]), notes)
    return Foreign(header, requests_in(streamed(path, emptied(held), seen), header.geometry, options, pruned=True))


def _pieces(path: Path) -> Iterator[Rows]:
    """A row for every token and layer, its experts by rank."""
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
            f"{path} line {columns['lines'][row]}: rank {rank[row]}; expected ranks 0 to {k - 1} of each token at a "
            "layer, line by line; was the file cut off?"
        )


IMPORTER = Importer(
    name="llama_ranks",
    summary="moe-trace of a llama.cpp fork: ids, prefill and decode, a row per expert",
    formats="FILE.csv with phase,token,layer,rank,expert",
    sniff=sniff,
    read=read,
)
