"""Logs without a token column: rows in the order of computation, each with its layer.

    layer,expert            as llama.cpp's `moe-trace` (pull request 28544) writes it: a row per expert
    layer_id,expert_ids     as a logging llama-server writes it: a row per token, `3,52 40 85`

Tokens follow from the order (`by_request.py`). Rows of one expert: k per token is that of
`--model`, else the length of the shortest run of one layer, which is a decode step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import Columns, by_pass, in_groups, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.llama_tables import NOTE, equally_often
from moereplay.traces.importers.rows import Rows, Seen, fits, requests_in, streamed
from moereplay.traces.importers.table import LAYER, ids_below, tables
from moereplay.traces.importers.text import numbers, start_of
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, TraceError

SINGLE, LISTS = ("layer", "expert"), ("layer_id", "expert_ids")
START = re.compile(rb"(layer,expert|layer_id,expert_ids)\r?\n")
LONGEST_START = 32  #: bytes
LONE_LAYER = "with one layer, passes cannot be recognised: every row counts as a decoded token"


def sniff(path: Path) -> bool:
    """Return True for a text that begins with either pair of names."""
    return path.is_file() and bool(START.match(start_of(path, LONGEST_START)))


def read(path: Path, options: Options) -> Foreign:
    """Return one request per prompt with its decoded tokens. Raises TraceError naming the line that is wrong."""
    found = START.match(start_of(path, LONGEST_START)) if path.is_file() else None
    if found is None:
        raise TraceError(f"{path}: invalid first line: expected {','.join(SINGLE)} or {','.join(LISTS)}")
    log = _log(path, found[1].decode() == ",".join(SINGLE), options)
    prompts = np.zeros(MOST_EXPERTS, np.int64)
    seen = Seen(_counted(_pieces(path, log), int(log.layers[0]), prompts))
    shape = seen.shape(options)
    notes = [options.assumed([*_read_as(log, len(seen.ends.last)), *renumbering(log.layers), log.said], shape)]
    notes += [NOTE] if equally_often([prompts[: shape.highest_id + 1]]) else []
    header = header_for(shape, options, Origin(LAYER_LOG.name, path, [path]), notes)
    return Foreign(header, requests_in(streamed(path, _pieces(path, log), seen), header.geometry, options, pruned=True))


@dataclass(frozen=True)
class _Log:
    """Layers and k of a log, which the split into tokens needs."""

    single: bool  #: a row per expert
    layers: np.ndarray  #: (L,) the file's numbers
    k: int
    said: str  #: of k


def _log(path: Path, single: bool, options: Options) -> _Log:
    """Return the layers, and k of rows of one expert.

    Raises TraceError naming the line with which a token lacks some.
    """
    found, runs = np.zeros(MOST_LAYERS, bool), _Runs()
    for columns in _rows(path, single):
        found[columns["layer"]] = True
        runs.add(columns["layer"], columns["lines"])
        k = columns["experts"].shape[1]
    if not single:
        return _Log(single, np.flatnonzero(found), k, f"k = {k}")
    k = options.geometry.k if options.geometry else runs.divisor
    runs.check(path, k)
    how = f"as {options.model or 'the geometry given'} has" if options.geometry else "the largest divisor of all runs"
    return _Log(single, np.flatnonzero(found), k, f"k = {k}, {how}")


class _Runs:
    """Lengths of the runs of a file that is read some rows at a time: the first of every length, and its line."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}  #: layer and line by the length, of runs that have ended
        self._open = (-1, 0, 0)  #: layer, line and length of the last run

    def add(self, layer: np.ndarray, lines: np.ndarray) -> None:
        """Add the layers (N,) and lines of the next rows."""
        starts = np.flatnonzero(np.diff(layer, prepend=self._open[0]))
        self._lengthen(int(starts[0]) if len(starts) else len(layer))
        if not len(starts):
            return
        self._end()
        lengths, at = np.unique(np.diff(starts), return_index=True)
        for length, row in zip(lengths.tolist(), starts[at].tolist(), strict=True):
            self._first.setdefault(length, (int(layer[row]), int(lines[row])))
        last = int(starts[-1])
        self._open = (int(layer[last]), int(lines[last]), len(layer) - last)

    def _lengthen(self, rows: int) -> None:
        layer, line, length = self._open
        self._open = layer, line, length + rows

    def _end(self) -> None:
        layer, line, length = self._open
        if length:
            self._first.setdefault(length, (layer, line))

    @property
    def divisor(self) -> int:
        """The largest divisor of every run, except the last run if it may be truncated."""
        return math.gcd(*self._first) or self._open[2]

    def check(self, path: Path, k: int) -> None:
        """Raises TraceError naming the line of the first run that is not a multiple of k."""
        self._end()
        wrong = min(
            ((line, layer, length) for length, (layer, line) in self._first.items() if length % k), default=None
        )
        if wrong:
            line, layer, length = wrong
            found = f"{length} rows of layer {layer} begin here: expected a multiple of {k} per token"
            raise TraceError(f"{path} line {line}: {found}; the file may be truncated or from another model")


def _read_as(log: _Log, requests: int) -> list[str]:
    """Describe the assumption about the order of rows."""
    if len(log.layers) == 1:
        return [LONE_LAYER]
    begun = f"{requests:,} requests, each a prompt (passes of several tokens) and its decode steps"
    return ["rows are in the order of computation, pass by pass", begun]


def _pieces(path: Path, log: _Log) -> Iterator[Rows]:
    """Yield tokens at a layer, some at a time."""
    found = _rows(path, log.single)
    if log.single:
        found = map(_by_token, in_groups(found, log.k), repeat(log.k))
    placed = _in_order(found) if len(log.layers) == 1 else by_pass({**each, "run": each["layer"]} for each in found)
    for columns in placed:
        yield Rows(path, **columns)


def _by_token(columns: Columns, k: int) -> Columns:
    """Return the rows of one expert each as rows of k."""
    return {name: values.reshape(-1, k) if name == "experts" else values[::k] for name, values in columns.items()}


def _in_order(pieces: Iterable[Columns]) -> Iterator[Columns]:
    """Yield every row as a decoded token of one request."""
    tokens = 0
    for columns in pieces:
        count = len(columns["layer"])
        one = np.zeros(count, np.int64)
        yield {**columns, "request": one, "token": tokens + np.arange(count), "phase": one + 1}
        tokens += count


def _rows(path: Path, single: bool) -> Iterator[Columns]:
    """Yield lines (N,), layers (N,) and experts (N, k), k = 1 of rows of one expert."""
    if not single:
        yield from _lists(path)
        return
    for table in tables(path, lambda found: SINGLE):
        layer, expert = table.checked(LAYER, "layer"), table.checked(ids_below(None), "expert")
        yield {"lines": table.lines, "layer": layer, "experts": expert[:, None]}


def _lists(path: Path) -> Iterator[Columns]:
    """Yield the rows of a log with lists of ids."""
    k, allowed = 0, ids_below(None)._replace(least=0)
    for table in tables(path, lambda found: LISTS):
        ids = []
        for row, cell in enumerate(table.columns["expert_ids"]):
            chosen = numbers(cell)
            if not chosen or not all(fits(each, allowed) for each in chosen) or len(chosen) != (k or len(chosen)):
                raise table.misfit(row, "expert_ids", cell, f"{k or 'some'} ids")
            k = len(chosen)
            ids.append(chosen)
        layer = table.checked(LAYER, "layer_id")
        yield {"lines": table.lines, "layer": layer, "experts": np.array(ids, np.int64)}


def _counted(pieces: Iterable[Rows], first: int, counts: np.ndarray) -> Iterator[Rows]:
    """Yield the rows, and count how often prompts chose each expert (E,) at the first layer of this number."""
    for rows in pieces:
        if rows.phase is not None:
            prompt = rows.experts[(rows.layer == first) & (rows.phase == 0)]
            counts += np.bincount(prompt[(prompt >= 0).all(1)].ravel(), minlength=len(counts))
        yield rows


LAYER_LOG = Importer(
    name="layer_log",
    summary="logs of llama.cpp without tokens: layers and ids in the order of computation",
    formats="FILE.csv or .log with layer,expert (a row per expert) or layer_id,expert_ids (`3,52 40 85`)",
    sniff=sniff,
    read=read,
)
