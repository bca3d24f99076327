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

from moereplay.traces.importers.by_request import Columns, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.rows import Rows, Seen, fits, requests_in, streamed
from moereplay.traces.importers.table import COUNT, LAYER, ids_below, tables
from moereplay.traces.importers.text import blocks, numbers, start_of
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, VALUES, TraceError, Values, shown
from moereplay_importers.by_pass import Joined, by_pass, in_groups
from moereplay_importers.llama_tables import NOTE, equally_often

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
    joined = Joined()
    seen = Seen(_counted(_pieces(path, log, joined), int(log.layers[0]), prompts))
    shape = seen.shape(options)
    notes = [options.assumed([*_read_as(log, joined, len(seen.ends.last)), *renumbering(log.layers), log.said], shape)]
    notes += joined.warnings()
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


def _read_as(log: _Log, joined: Joined, requests: int) -> list[str]:
    """Describe the assumption about the order of rows."""
    if len(log.layers) == 1:
        return [LONE_LAYER]
    return ["rows are in the order of computation, pass by pass", joined.begun(requests)]


def _pieces(path: Path, log: _Log, joined: Joined | None = None) -> Iterator[Rows]:
    """Yield tokens at a layer, some at a time."""
    found = _rows(path, log.single)
    if log.single:
        found = map(_by_token, in_groups(found, log.k), repeat(log.k))
    runs = ({**each, "run": each["layer"]} for each in found)
    placed = _in_order(found) if len(log.layers) == 1 else by_pass(runs, found=joined)
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


# -- colibri's stream

CHOICE = r"\d{1,6}:\d{1,6}\.\d{1,6}"
LINE = re.compile(rf"(\d{{1,15}}) (\d{{1,15}}) (\d{{1,6}})((?: {CHOICE})+)\s*", re.ASCII)
COLIBRI_START = re.compile(rf"\d{{1,15}} \d{{1,15}} \d{{1,6}} {CHOICE}( |\r?\n)".encode())
LONGEST_COLIBRI_START = 128  #: bytes
FORM = "`call row layer id:gate id:gate ...` on every line"
LISTED = 4  #: numbers that a note lists
DIGITS = "gate weights have four digits, as the recorder writes them"


def sniff_colibri(path: Path) -> bool:
    """Return True for a text that begins with three numbers and an expert with its weight."""
    return path.is_file() and bool(COLIBRI_START.match(start_of(path, LONGEST_COLIBRI_START)))


def read_colibri(path: Path, options: Options) -> Foreign:
    """Read the stream of colibri with ROUTE_TRACE=FILE: `call row layer id:gate ...`, a line per token and layer.

        0 0 3 17:0.4120 40:0.2211
        0 1 3 9:0.3812 17:0.3011
        1 0 4 22:0.5120 3:0.1820

    `call` counts MoE layers as they are computed, `row` the tokens of one call; a call without rows uses up a number
    but writes no line. Experts are in rank order with the gate weights that the layer applies, to four digits. A new
    pass begins where the layer does not ascend. Layers are the model's own numbers.

    Return one request per prompt with its decoded tokens. Raises TraceError naming the line that is wrong.
    """
    if not sniff_colibri(path):
        raise TraceError(f"{path}: invalid first line: expected {FORM}, such as 0 0 3 17:0.4120")
    empty, joined = _Empty(), Joined()
    seen = Seen(_colibri_pieces(path, empty, joined))
    shape = seen.shape(options)
    begun = joined.begun(len(seen.ends.last), "calls of several rows")
    said = ["one sequence at a time, not a batch", begun, *renumbering(seen.layers)]
    notes = [options.assumed(said, shape), DIGITS, *empty.said(), *joined.warnings()]
    header = header_for(shape, options, Origin(COLIBRI_ROUTE.name, path, [path]), notes)
    return Foreign(header, requests_in(streamed(path, _colibri_pieces(path), seen), header.geometry, options))


class _Empty:
    """Numbers of calls that no line has."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._count, self._last = 0, -1

    def add(self, call: np.ndarray) -> None:
        """Look at the calls (N,) of the lines that come next."""
        before = np.concatenate([[self._last if self._last >= 0 else call[0]], call[:-1]])
        for at in np.flatnonzero(call - before > 1).tolist():
            self._count += int(call[at] - before[at] - 1)
            self._found += range(int(before[at]) + 1, int(min(call[at], before[at] + 1 + LISTED)))
        self._last = int(call[-1])

    def said(self) -> list[str]:
        """Describe the calls without lines, for a note."""
        if not self._count:
            return []
        listed = ", ".join(map(str, self._found[:LISTED])) + (", ..." if self._count > LISTED else "")
        return [f"{self._count:,} calls ({listed}) have no lines: treated as calls without rows"]


def _colibri_pieces(path: Path, empty: _Empty | None = None, joined: Joined | None = None) -> Iterator[Rows]:
    for columns in by_pass(_blocks(path, empty), found=joined):
        yield Rows(path, **columns)


def _blocks(path: Path, empty: _Empty | None) -> Iterator[Columns]:
    """Yield some lines at a time: their numbers, call as `run`, layer, experts and weights (N, k)."""
    k, before = 0, np.zeros((0, 2), np.int64)
    for number, lines in blocks(path, ended=True):
        parsed = [_line(line, k, f"{path} line {at}") for at, line in enumerate(lines, number)]
        k = k or len(parsed[0][1])
        if wrong := [at for at, (_, each, _) in enumerate(parsed) if len(each) != k]:
            raise TraceError(
                f"{path} line {number + wrong[0]}: invalid line {shown(lines[wrong[0]])!r}: expected {FORM}, "
                f"{k} experts"
            )
        places, experts, weights = map(np.array, zip(*parsed, strict=True))
        _check(path, number, places[:, :2], COUNT, "call or row")
        _check(path, number, places[:, 2:], LAYER, "layer")
        _check(path, number, experts, ids_below(None), "expert")
        _check(path, number, weights, VALUES["weights"], "gate")
        _check_rows(path, number - len(before), np.concatenate([before, places[:, :2]]))
        if empty:
            empty.add(places[:, 0])
        before, at = places[-1:, :2], number + np.arange(len(lines))
        yield {"lines": at, "run": places[:, 0], "layer": places[:, 2], "experts": experts, "weights": weights}


def _line(line: str, k: int, place: str) -> tuple[list[int], list[int], list[float]]:
    """Call, row and layer; the experts; their weights."""
    found = LINE.fullmatch(line)
    if found is None:
        raise TraceError(f"{place}: invalid line {shown(line)!r}: expected {FORM}{f', {k} experts' if k else ''}")
    choices = [choice.split(":") for choice in found[4].split()]
    places = [int(found[group]) for group in (1, 2, 3)]
    return places, [int(expert) for expert, _ in choices], [float(weight) for _, weight in choices]


def _check(path: Path, first: int, values: np.ndarray, allowed: Values, name: str) -> None:
    wrong = np.argwhere((values < allowed.least) | (values > allowed.most))
    if len(wrong):
        row, column = wrong[0]
        raise TraceError(
            f"{path} line {first + row}: invalid {name} {values[row, column]}: expected {allowed.expected}"
        )


def _check_rows(path: Path, first: int, places: np.ndarray) -> None:
    """Raises TraceError naming the line whose row (N, 2) is not the next one, or whose call is an earlier one."""
    call, row = places.T
    step = np.diff(call, prepend=call[0] - 1)
    expected = np.where(step == 0, np.concatenate([[0], row[:-1] + 1]), 0)
    if first > 1:
        expected[0] = row[0]  # it has been held to the line before it
    wrong = np.flatnonzero((step < 0) | (row != expected))
    if len(wrong):
        at = wrong[0]
        fix = f"expected row {expected[at]}" if row[at] != expected[at] else "expected a later call than before"
        fix += "; the file may hold two runs"
        raise TraceError(f"{path} line {first + at}: call {call[at]}, row {row[at]}; {fix}")


COLIBRI_ROUTE = Importer(
    name="colibri_route",
    summary="colibri's ROUTE_TRACE stream: ids in rank order with gate weights",
    formats="FILE with `call row layer id:gate ...` on every line",
    sniff=sniff_colibri,
    read=read_colibri,
)
