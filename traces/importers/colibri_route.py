"""The stream that colibri writes with ROUTE_TRACE=FILE: `call row layer id:gate ...`, a line per token and layer.

    0 0 3 17:0.4120 40:0.2211
    0 1 3 9:0.3812 17:0.3011
    1 0 4 22:0.5120 3:0.1820

`call` counts MoE layers as they are computed, `row` the tokens of one call; a call without rows uses up a number but
writes no line. Experts are in rank order with the gate weights that the layer applies, to four digits. A new pass
begins where the layer does not ascend; tokens and requests follow from the passes (`by_request.py`). Layers are the
model's own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import Columns, by_pass, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.rows import Rows, Seen, requests_in, streamed
from moereplay.traces.importers.table import COUNT, LAYER, ids_below
from moereplay.traces.importers.text import blocks, start_of
from moereplay.traces.schema import VALUES, TraceError, Values, shown

CHOICE = r"\d{1,6}:\d{1,6}\.\d{1,6}"
LINE = re.compile(rf"(\d{{1,15}}) (\d{{1,15}}) (\d{{1,6}})((?: {CHOICE})+)\s*", re.ASCII)
START = re.compile(rf"\d{{1,15}} \d{{1,15}} \d{{1,6}} {CHOICE}( |\r?\n)".encode())
LONGEST_START = 128  #: bytes
FORM = "`call row layer id:gate id:gate ...` on every line"
LISTED = 4  #: numbers that a note lists
DIGITS = "gate weights have four digits, as the recorder writes them"


def sniff(path: Path) -> bool:
    """Return True for a text that begins with three numbers and an expert with its weight."""
    return path.is_file() and bool(START.match(start_of(path, LONGEST_START)))


def read(path: Path, options: Options) -> Foreign:
    """Return one request per prompt with its decoded tokens. Raises TraceError naming the line that is wrong."""
    if not sniff(path):
        raise TraceError(f"{path}: invalid first line: expected {FORM}, such as 0 0 3 17:0.4120")
    empty = _Empty()
    seen = Seen(_pieces(path, empty))
    shape = seen.shape(options)
    begun = f"{len(seen.ends.last):,} requests, each a prompt (calls of several rows) and its decode steps"
    said = ["one sequence at a time, not a batch", begun, *renumbering(seen.layers)]
    notes = [options.assumed(said, shape), DIGITS, *empty.said()]
    header = header_for(shape, options, Origin(COLIBRI_ROUTE.name, path, [path]), notes)
    return Foreign(header, requests_in(streamed(path, _pieces(path), seen), header.geometry, options))


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


def _pieces(path: Path, empty: _Empty | None = None) -> Iterator[Rows]:
    for columns in by_pass(_blocks(path, empty)):
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
    sniff=sniff,
    read=read,
)
