"""Lines that any engine can print among others: `@moe REQUEST TOKEN LAYER IDS [WEIGHTS]`.

    @moe-begin chat-7 10
    2026-11-23 10:00:01 decode @moe chat-7 0 3 17,3,60,5 .4,.3,.2,.1
    @moe-end chat-7

Text before a mark is ignored. REQUEST is a word, TOKEN counts the tokens of the request, LAYER has any
numbers that rise with the layers, IDS are experts, the best first, and WEIGHTS their gate weights. Lines of many
requests may be mixed. `@moe-begin REQUEST PROMPT_TOKENS` gives the prompt length, and ends an earlier request of
that name; `@moe-end REQUEST [TOKENS]` says that one is complete, and keeps so many of its tokens. Both may be left out.
A token at a layer that is printed again replaces what was printed before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.text import blocks, start_of
from moereplay.traces.recorder import Gathering
from moereplay.traces.schema import MOST_LAYERS, Geometry, Request, TraceError, check_values, shown

LOOKED_AT = 1 << 20  #: bytes of a log in which a first line is looked for
NUMBER = r"(\d{1,15})"
IDS = r"(-?\d{1,6}(?:,-?\d{1,6})*)"
WEIGHT = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
ROW = re.compile(rf"@moe (\S+) {NUMBER} {NUMBER} {IDS}(?: ({WEIGHT}(?:,{WEIGHT})*))?\s*", re.ASCII)
BEGIN = re.compile(rf"@moe-begin (\S+) {NUMBER}\s*", re.ASCII)
END = re.compile(rf"@moe-end (\S+)(?: {NUMBER})?\s*", re.ASCII)
ANY = re.compile(r"@moe(?:-begin|-end)? ")
ANY_BYTES = re.compile(ANY.pattern.encode())
FORM = "@moe REQUEST TOKEN LAYER ID,ID,... [WEIGHT,WEIGHT,...]"
FORMS = f"{FORM}, @moe-begin REQUEST PROMPT_TOKENS or @moe-end REQUEST [TOKENS]"
NO_PROMPTS = "no @moe-begin line states a prompt length: every token counts as decoded"


class Row(NamedTuple):
    """A token at a layer."""

    request: str
    token: int
    layer: int  #: by the file's number
    values: dict[str, np.ndarray]  #: chosen (at most k,) and optional weights, the same number


class Begin(NamedTuple):
    """A request begins."""

    request: str
    prompt: int


class End(NamedTuple):
    """A request is complete."""

    request: str
    tokens: int | None = None


Line = Row | Begin | End


def sniff(path: Path) -> bool:
    """Return True for a text with the mark near its start."""
    return path.is_file() and ANY_BYTES.search(start_of(path, LOOKED_AT)) is not None


def read(path: Path, options: Options) -> Foreign:
    """Return requests in the order in which they end. Raises TraceError naming the line that is not as documented."""
    if not path.is_file():
        raise TraceError(f"{path}: invalid file: expected a text file with lines {FORM}")
    survey = Survey(path)
    shape = Shape(len(survey.numbers), survey.k, survey.highest, None if options.geometry else survey.highest + 1)
    origin = Origin(ROUTE_LINES.name, path, [path])
    header = header_for(shape, options, origin, survey.notes(shape, options))
    layers = {number: layer for layer, number in enumerate(survey.numbers)}
    return Foreign(header, _requests(path, layers, header.geometry, options))


class Survey:
    """A first reading of the file, because the start of a log does not describe its content."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError naming the line that is not as documented."""
        self.k, self.highest, self.again = 0, -1, 0  #: `again`: rows that replace others
        self._arrays: set[str] = set()
        self._layers = 0  #: as bits
        self._open: dict[str, dict[int, int]] = {}  #: layers of each token, as bits, by request
        self._prompts = False
        for number, line in _lines(path):
            if isinstance(line, Row):
                self._add(line, f"{path} line {number}")
                continue
            rows = self._open.pop(line.request, None)
            if isinstance(line, Begin):
                self._prompts, self._open[line.request] = True, {}
            elif not rows:
                raise TraceError(f"{path} line {number}: request {shown(line.request)} ends without a row")
        if not self._layers:
            raise TraceError(f"{path}: missing lines {FORM}: expected one per token and layer")

    @property
    def numbers(self) -> list[int]:
        """The file's numbers of the layers, rising."""
        return [number for number in range(self._layers.bit_length()) if self._layers >> number & 1]

    def _add(self, row: Row, place: str) -> None:
        self._arrays = self._arrays or set(row.values)
        if set(row.values) != self._arrays:
            raise TraceError(f"{place}: weights on some lines only: expected on every line or on none")
        ids, bit = row.values["chosen"], 1 << row.layer
        self.k, self.highest = max(self.k, len(ids)), max(self.highest, int(ids.max()))
        tokens = self._open.setdefault(row.request, {})
        self.again += bool(tokens.get(row.token, 0) & bit)
        tokens[row.token] = tokens.get(row.token, 0) | bit
        self._layers |= bit

    def notes(self, shape: Shape, options: Options) -> list[str]:
        """Return notes about rows that were assumed, replaced and left out."""
        found = self.numbers
        rising = f"layers {found[0]}..{found[-1]} of the file are MoE layers" if found[-1] >= len(found) else ""
        said = [options.assumed([f"k = {self.k}", *([rising] if rising else [])], shape)]
        said += [] if self._prompts else [NO_PROMPTS]
        said += [f"{self.again:,} rows replace earlier rows of the same token and layer"] if self.again else []
        cut = sum(tokens[max(tokens)] != self._layers for tokens in self._open.values() if tokens)
        said += [f"{cut:,} requests without an end stop inside a token, which is left out"] if cut else []
        return said


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    for first, lines in blocks(path, ended=True):
        for number, line in enumerate(lines, first):
            if not (mark := ANY.search(line)):
                continue
            text, place = line[mark.start() :], f"{path} line {number}"
            if row := ROW.fullmatch(text):
                yield number, _row(row, place)
            elif begin := BEGIN.fullmatch(text):
                yield number, Begin(begin[1], int(begin[2]))
            elif end := END.fullmatch(text):
                yield number, End(end[1], None if end[2] is None else int(end[2]))
            else:
                raise TraceError(f"{place}: invalid line {shown(text)!r}: expected {FORMS}")


def _row(found: re.Match[str], place: str) -> Row:
    request, token, layer, ids, weights = found.groups()
    if int(layer) >= MOST_LAYERS:
        raise TraceError(f"{place}: invalid layer {layer}: expected 0 to {MOST_LAYERS - 1}")
    chosen = [int(number) for number in ids.split(",")]
    values = {"chosen": np.array(chosen)}
    if weights is not None:
        values["weights"] = np.array([float(number) for number in weights.split(",")])
    for name, given in values.items():
        check_values(given, name, f"{place}: {name}")
        if len(given) != len(chosen):
            raise TraceError(f"{place}: {len(given)} weights for {len(chosen)} experts: expected one each")
    routed = [expert for expert in chosen if expert >= 0]
    if len(set(routed)) < len(routed):
        raise TraceError(f"{place}: an expert is repeated: expected each once")
    return Row(request, int(token), int(layer), values)


def _requests(path: Path, layers: dict[int, int], geometry: Geometry, options: Options) -> Iterator[Request]:
    open_: dict[str, tuple[Gathering, int]] = {}  #: rows and prompt of requests that have not ended

    def ended(name: str, rows: Gathering, prompt: int, tokens: int | None) -> Iterator[Request]:
        """Yield the request unless it has no complete token."""
        if tokens == 0:
            return
        try:
            request = rows.request(0, tokens)
        except TraceError as wrong:
            raise TraceError(f"{path}: request {shown(name)}: {wrong}") from None
        count = len(request.chosen)
        yield replace(request, prompt_length=options.prompt_of(count, min(prompt, count)))

    for _, line in _lines(path):
        if isinstance(line, Row):
            rows, _ = open_.setdefault(line.request, (Gathering(geometry), 0))
            rows.put(line.token, layers[line.layer], line.values)
            continue
        if line.request in open_:
            rows, prompt = open_.pop(line.request)
            yield from ended(
                line.request, rows, prompt, line.tokens if isinstance(line, End) else rows.complete_tokens()
            )
        if isinstance(line, Begin):
            open_[line.request] = Gathering(geometry), line.prompt
    for name, (rows, prompt) in open_.items():
        yield from ended(name, rows, prompt, rows.complete_tokens())


ROUTE_LINES = Importer(
    name="route_lines",
    summary="lines that any engine can print in its log: ids, gate weights, interleaved requests",
    formats=f"a text with lines {FORM}",
    sniff=sniff,
    read=read,
)
