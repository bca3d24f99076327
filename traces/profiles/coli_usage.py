"""The use counts that colibri keeps next to a model, `.coli_usage`: `layer expert count` per line, no zeros.

Two lines may precede them: `-1 layers experts`, and `-2 version engine`, the engine as an FNV-1a hash. Its
inkling engine writes the same as numbers instead: "IKU1", layers and experts as uint32, then a uint32 per layer and
expert. Source: JustVugg/colibri, route_trace.h. Layers are the model's own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers.text import blocks, start_of
from moereplay.traces.profiles.contract import MOST_CELLS, Counts, Form, check_size, checked, tabulated
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, TraceError, shown

LINE = re.compile(r"\s*(-[12]|\d{1,5})\s+(\d{1,5})\s+(\d{1,15})\s*", re.ASCII)
START = re.compile(rb"(-[12]|\d{1,5}) \d{1,5} \d{1,15}\r?\n")
LONGEST_START = 64  #: bytes
SIZES, WRITER = -1, -2  #: in place of a layer
VERSION = 1
ENGINES = ("glm_moe_dsa", "inkling", "olmoe", "kimi_k3", "deepseek_v4", "qwen38", "glm53")
DENSE = b"IKU1"
WORD = np.dtype("<u4")
FORM_LINE = "`layer expert count` on every line"


def sniff(path: Path) -> bool:
    """Recognise a text that begins with three numbers, or inkling's magic number."""
    if not path.is_file():
        return False
    start = start_of(path, LONGEST_START)
    return bool(START.match(start)) or start.startswith(DENSE)


def read(path: Path) -> Counts:
    """Read the counts. Raises TraceError naming the first invalid line."""
    if start_of(path, len(DENSE)) == DENSE:
        return _dense(path)
    cells: dict[tuple[int, int], float] = {}
    sizes: tuple[int, int] | None = None
    notes: list[str] = []
    for at, (layer, expert, count) in _lines(path):
        if layer == SIZES:
            sizes = expert, count
        elif layer == WRITER:
            notes.append(_writer(path, at, expert, count))
        elif (layer, expert) in cells or len(cells) == MOST_CELLS:
            wrong = f"layer {layer}, expert {expert} is repeated" if (layer, expert) in cells else "too many lines"
            raise TraceError(f"{path} line {at}: {wrong}: expected each expert of a model once")
        else:
            cells[layer, expert] = count
    if sizes:
        _check_sizes(path, cells, *sizes)
    else:
        notes.append("no line of sizes: experts = the highest id + 1")
    return tabulated(path, cells, sizes[1] if sizes else None, tuple(notes))


def _lines(path: Path) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield line numbers and the three numbers of each line."""
    for number, lines in blocks(path, ended=True):
        for at, line in enumerate(lines, number):
            found = LINE.fullmatch(line)
            if found is None:
                raise TraceError(f"{path} line {at}: invalid line {shown(line)!r}: expected {FORM_LINE}")
            layer, expert, count = map(int, found.groups())
            yield at, (layer, expert, count)


def _writer(path: Path, at: int, version: int, engine: int) -> str:
    if version > VERSION:
        raise TraceError(f"{path} line {at}: unknown version {version}: expected {VERSION}")
    names = {hash_of(name): name for name in ENGINES}
    return f"written by colibri's engine {names.get(engine, f'{engine:08x}')}"


def hash_of(name: str) -> int:
    """Return the 32-bit FNV-1a hash of an engine's name."""
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def _check_sizes(path: Path, cells: dict[tuple[int, int], float], layers: int, experts: int) -> None:
    """Check cells against the stated sizes; one more layer is allowed, for multi-token prediction."""
    if not 0 < experts <= MOST_EXPERTS or layers > MOST_LAYERS:
        raise TraceError(f"{path}: invalid sizes of {layers} layers of {experts} experts: expected a model's sizes")
    beyond = [place for place in cells if place[0] > layers or place[1] >= experts]
    if beyond:
        layer, expert = beyond[0]
        raise TraceError(
            f"{path}: layer {layer}, expert {expert}: its first lines state {layers} layers, {experts} experts"
        )


def _dense(path: Path) -> Counts:
    head = np.fromfile(path, WORD, 3)
    layers, experts = (int(word) for word in head[1:]) if len(head) == 3 else (0, 0)
    check_size(path, layers, experts)
    if path.stat().st_size != WORD.itemsize * (len(head) + layers * experts):
        raise TraceError(
            f"{path}: {layers} layers of {experts} experts do not match the size of the file: it may be truncated"
        )
    chosen = np.fromfile(path, WORD, offset=head.nbytes).reshape(layers, experts)
    return checked(path, chosen, ("written by colibri's engine inkling",))


FORM = Form(
    name="coli_usage",
    summary="use counts that colibri keeps next to a model",
    formats="FILE.coli_usage with `layer expert count` on every line, or inkling's IKU1",
    sniff=sniff,
    read=read,
)
