"""JSON lines with a token each, as warp's and OLMoE's recorders publish decoded steps.

    {"tok": 0, "layers": [[5, 1], [3, 7]]}

`tok` counts from any number on, one more on every line; `layers` has the experts of every MoE layer in order, -1 for
"not routed". Neither weights nor prompts are recorded, and ids may stand in their own order instead of that of rank.
The file is one request, and may be packed with gzip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.by_request import Keys, grids
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from moereplay.traces.importers.rows import NARROW, fits, refuse_twice
from moereplay.traces.importers.table import COUNT, ids_below
from moereplay.traces.importers.text import blocks, parse_json, start_of, suffix_of
from moereplay.traces.schema import Request, TraceError, shown

START = re.compile(rb'\s*\{\s*"tok"\s*:\s*\d{1,18}\s*,\s*"layers"\s*:\s*\[')
LONGEST_START = 64  #: bytes
LINE = '{"tok": number, "layers": [[ids of a layer], ...]}'
DECODED = "no phase recorded: every token counts as decoded"
SORTED = "ids stand in ascending order everywhere: ranks were not recorded"


def sniff(path: Path) -> bool:
    """JSON lines whose first begins with `tok` and `layers`."""
    return path.is_file() and suffix_of(path) == ".jsonl" and bool(START.match(start_of(path, LONGEST_START)))


def read(path: Path, options: Options) -> Foreign:
    """One request. Raises TraceError naming the line that is not as documented."""
    if not sniff(path):
        raise TraceError(f"{path}: does not begin with a token's line; expected {LINE} on each")
    ids, tokens = _read(path)
    layers, k = ids.shape[1:]
    notes = [DECODED, SORTED] if k > 1 and (ids[:, :, 1:] > ids[:, :, :-1]).all() else [DECODED]
    origin = Origin(IMPORTER.name, path, [path], decoding="recorded decode steps")
    header = header_for(Shape(layers, k, int(ids.max())), options, origin, notes)
    return Foreign(header, _requests(path, ids, tokens, options))


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids (T, L, k) in few bytes, as they are all of one request, and tokens (T,)."""
    records, parts = _Records(path), []
    for number, lines in blocks(path, ended=True):
        ids, tokens = records.read(number, lines)
        at = np.repeat(np.arange(number, number + len(lines)), ids.shape[1])
        refuse_twice(path, at, ids.reshape(-1, ids.shape[2]))
        parts.append((ids.astype(NARROW["experts"]), tokens))
    ids, tokens = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ids, tokens


def _requests(path: Path, ids: np.ndarray, tokens: np.ndarray, options: Options) -> Iterator[Request]:
    """The one, its tokens in order. Raises TraceError if one is missing or stands twice."""
    zero = np.zeros_like(tokens)
    for grid in grids(Keys(zero, tokens, zero, 1, 1 + np.arange(len(tokens)), str(path))):
        yield Request(grid.dense(ids, -1)[:, 0], prompt_tokens(options, grid.tokens, 0))


class _Records:
    """Lines held to the first one: so many layers of so many experts."""

    def __init__(self, path: Path) -> None:
        self._path, self._id = path, ids_below(None)
        self._layers = self._k = 0

    def read(self, number: int, lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids (N, L, k) and tokens (N,) of lines, the first of which has this number."""
        found = [self._record(line, f"{self._path} line {at}") for at, line in enumerate(lines, number)]
        ids, tokens = zip(*found, strict=True)
        return np.array(ids, np.int64), np.array(tokens, np.int64)

    def _record(self, line: str, place: str) -> tuple[list[list[int]], int]:
        record = parse_json(line, place)
        if not isinstance(record, dict) or set(record) != {"tok", "layers"} or not fits(record["tok"], COUNT):
            raise TraceError(f"{place}: not a token's line; expected {LINE}")
        layers = record["layers"]
        if not isinstance(layers, list) or not layers or len(layers) != (self._layers or len(layers)):
            raise TraceError(f"{place}: not {self._layers or 'any'} layers; expected as many as on the first line")
        self._layers = len(layers)
        for number, ids in enumerate(layers):
            if not self._are_ids(ids):
                expected = f"{self._k or 'some'} ids, each {self._id.expected}"
                raise TraceError(f"{place}: layers[{number}] is {shown(ids)}; expected {expected}")
        return layers, record["tok"]

    def _are_ids(self, ids: Any) -> bool:
        """Whether this is a list of experts, as many as in every layer before."""
        if not isinstance(ids, list) or not ids or len(ids) != (self._k or len(ids)):
            return False
        self._k = len(ids)
        return all(fits(cell, self._id) for cell in ids)


IMPORTER = Importer(
    name="token_lines",
    summary="decoded steps of warp and of OLMoE's recorder: ids, a line per token",
    formats=f"FILE.jsonl with {LINE} on every line",
    sniff=sniff,
    read=read,
)
