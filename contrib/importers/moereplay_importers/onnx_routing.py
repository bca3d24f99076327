"""Routing that ONNX Runtime logs for its MoE and QMoE nodes, and the CSV that its tool makes of the log.

    [qmoe_prompt_runner] 1/2 prompt_start
    ... moe_routing {"node_index": 10, "node_name": "/model/layers.0/moe/QMoE", "num_rows": 5, "top_k": 3,
                     "expert_ids": [6, 10, 8, ...], "router_weights": [...]}

A line is a node in one pass, `num_rows` tokens with `top_k` experts each; nodes are layers in the order of their first
lines. A pass begins where that order falls back. The first pass of a prompt, and those of several tokens after it, are
prompt; without marks a pass of several tokens after decode steps begins a request. The CSV has the last row of every
pass alone. Source: microsoft/onnxruntime, tools/python/qmoe_expert_distribution.py and its test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.columns import read_as
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, header_for
from moereplay.traces.importers.rows import Rows, Seen, fits, requests_in, streamed
from moereplay.traces.importers.table import ids_below
from moereplay.traces.importers.text import blocks, parse_json, start_of
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, VALUES, TraceError, Values, shown
from moereplay.traces.texts import counted

MARK = "moe_routing {"
INCOMPLETE, FOOTER = "moe_routing_truncated", "moe_routing_complete "
PROMPT = re.compile(r"\[qmoe_prompt_runner\] (\d{1,9})/\d{1,9} prompt_start\s*", re.ASCII)
LOOKED_AT = 1 << 18  #: bytes of a log in which a first line is looked for
TABLE = re.compile(rb"prompt_index,prompt,inference_index,(?:node_index,|qmoe,)[^\r\n]*selected_expert_ids")
SIZE = Values("iu", 1, 1 << 24)
FORM = 'lines with moe_routing {"node_name", "num_rows", "top_k", "expert_ids"}'
LAST_ROWS = "the CSV has only the last row of every pass, so only the last token of a prompt; the log has all rows"


def sniff(path: Path) -> bool:
    """Return True for a text with the mark near its start, or the CSV of the tool."""
    if not path.is_file():
        return False
    start = start_of(path, LOOKED_AT)
    return MARK.encode() in start or bool(TABLE.match(start))


def read(path: Path, options: Options) -> Foreign:
    """Return a request per prompt.

    Raises TraceError naming an invalid line, or one that shows that others are missing.
    """
    if not path.is_file():
        raise TraceError(f"{path}: invalid log: expected {FORM}")
    if table := TABLE.match(start_of(path, LOOKED_AT)):
        layer = "node_index" if b",node_index," in table[0] else "qmoe"
        names = {
            "request": "prompt_index",
            "token": "inference_index",
            "layer": layer,
            "experts": "selected_expert_ids",
        }
        return read_as(path, options, {key: (name,) for key, name in names.items()}, ONNX_ROUTING.name, LAST_ROWS)
    log = _Log(path)
    seen = Seen(log.pieces())
    shape = seen.shape(options)
    begun = "as marked" if log.marked else "each a prompt and its decode steps"
    requests = f"{counted(len(seen.ends.last), 'request')}, {begun}"
    layers = f"{len(log.nodes)} nodes are layers, in the order of their first lines"
    notes = [options.assumed(["one sequence at a time, not a batch", requests, layers, f"k = {seen.k}"], shape)]
    header = header_for(shape, options, Origin(ONNX_ROUTING.name, path, [path], decoding="run by ONNX Runtime"), notes)
    return Foreign(header, requests_in(streamed(path, _Log(path).pieces(), seen), header.geometry, options))


class _Log:
    """The rows of a log, and the facts known after reading all of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes: dict[tuple[Any, Any], int] = {}  #: layers, by index and name of the node
        self.marked = False  #: whether prompts have marks
        self._request, self._layer = -1, MOST_LAYERS
        self._tokens = self._rows = 0  #: tokens of the request before the pass, and of the pass
        self._decoding = self._fresh = True
        self._weighed: bool | None = None
        self._records = 0

    def pieces(self) -> Iterator[Rows]:
        """Yield some lines at a time. Raises TraceError naming the line that is wrong."""
        for first, lines in blocks(self.path, ended=True):
            found = [rows for at, line in enumerate(lines, first) if (rows := self._line(line, at))]
            if found:
                widest = max(rows["experts"].shape[1] for rows in found)
                wide = [{name: _widened(name, each, widest) for name, each in rows.items()} for rows in found]
                yield Rows(self.path, **{name: np.concatenate([rows[name] for rows in wide]) for name in wide[0]})
        if not self._records:
            raise TraceError(f"{self.path}: no rows: expected {FORM}")

    def _line(self, line: str, at: int) -> dict[str, np.ndarray] | None:
        place = f"{self.path} line {at}"
        if INCOMPLETE in line:
            raise TraceError(
                f"{place}: the recorder dropped records ({shown(line[line.index(INCOMPLETE) :])}); raise its limits"
            )
        if PROMPT.search(line):
            self.marked = self._fresh = True
        elif FOOTER in line:
            self._check_footer(line.partition(FOOTER)[2], place)
        elif MARK in line:
            return self._rows_of(parse_json(line[line.index(MARK) + len(MARK) - 1 :], place), at, place)
        return None

    def _check_footer(self, text: str, place: str) -> None:
        """Raises TraceError if the log's footer states another number of lines."""
        footer = parse_json(text, place)
        count = footer.get("routing_records") if isinstance(footer, dict) else None
        if count != self._records:
            raise TraceError(
                f"{place}: {shown(count)} records: expected {self._records:,}, those before it; the file may "
                f"be truncated"
            )

    def _rows_of(self, event: dict[str, Any], at: int, place: str) -> dict[str, np.ndarray]:
        """Return the rows of one node in one pass."""
        rows, k = (_number(event, key, place) for key in ("num_rows", "top_k"))
        ids = _numbers(event, "expert_ids", rows, k, ids_below(None), place)
        self._begin(event, rows, place)
        self._records += 1
        token = self._tokens + np.arange(rows)
        found = {"lines": np.full(rows, at), "request": np.full(rows, self._request), "token": token}
        found |= {"layer": np.full(rows, self._layer), "experts": ids.astype(np.int64)}
        weighed = "router_weights" in event
        if self._weighed not in (None, weighed):
            raise TraceError(f"{place}: router_weights on some lines only: expected on every line or on none")
        self._weighed = weighed
        if weighed:
            found["weights"] = _numbers(event, "router_weights", rows, k, VALUES["weights"], place)
        return found | {"phase": np.full(rows, int(self._decoding))}

    def _begin(self, event: dict[str, Any], rows: int, place: str) -> None:
        """Begin a request or a pass if the node does not follow the previous one."""
        node = event.get("node_index"), event.get("node_name")
        if not all(isinstance(each, str | int | None) for each in node) or len(self.nodes) > MOST_LAYERS:
            raise TraceError(f"{place}: invalid node {shown(node)}: expected node_index and node_name")
        layer = self.nodes.setdefault(node, len(self.nodes))
        if layer <= self._layer or self._fresh:
            begins = self._fresh or (not self.marked and rows > 1 and self._decoding)
            self._request += begins
            self._decoding = not begins and (rows == 1 or self._decoding)
            self._tokens = 0 if begins else self._tokens + self._rows
            self._rows, self._fresh = rows, False
        if rows != self._rows:
            raise TraceError(
                f"{place}: invalid num_rows {rows:,}: expected {self._rows:,}, as in the first layer of the pass"
            )
        self._layer = layer


def _widened(name: str, values: np.ndarray, width: int) -> np.ndarray:
    """Return lists (N, k) of nodes with fewer experts, with -1 and no weight in the other places."""
    fill = {"experts": -1, "weights": 0}.get(name)
    return values if fill is None else np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def _number(event: dict[str, Any], key: str, place: str) -> int:
    allowed = SIZE._replace(most=MOST_EXPERTS) if key == "top_k" else SIZE
    if not fits(event.get(key), allowed):
        raise TraceError(
            f"{place}: invalid {key} {shown(event.get(key))}: expected {allowed.least} to {allowed.most:,}"
        )
    return event[key]


def _numbers(event: dict[str, Any], key: str, rows: int, k: int, allowed: Values, place: str) -> np.ndarray:
    """Return (rows, k) of a flat list."""
    found = event.get(key)
    if not isinstance(found, list) or len(found) != rows * k:
        has = f"{len(found):,} numbers" if isinstance(found, list) else shown(found)
        raise TraceError(f"{place}: {key} has {has}: expected num_rows * top_k = {rows * k:,}")
    if wrong := [each for each in found if not fits(each, allowed)]:
        raise TraceError(f"{place}: invalid {key} {shown(wrong[0])}: expected {allowed.expected}")
    return np.array(found).reshape(rows, k)


ONNX_ROUTING = Importer(
    name="onnx_routing",
    summary="ONNX Runtime's log of MoE and QMoE nodes: ids and router weights of every pass; or the CSV made of it",
    formats="a log with moe_routing {...} lines, or inference CSV with prompt_index,...,selected_expert_ids",
    sniff=sniff,
    read=read,
)
