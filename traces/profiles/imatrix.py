"""Importance matrices of llama.cpp (`llama-imatrix`) in GGUF: the tokens of each expert; and a bounded GGUF reader.

`blk.N.ffn_{gate,up,down}_exps.weight.counts` is float32 with an element per expert; gate, up and down of a layer say
the same. Source: ggml-org/llama.cpp tools/imatrix/imatrix.cpp. Matrices of the older `.dat` form, and those converted
from it, hold one count per tensor: they say nothing of experts.

The `gguf` package (0.19) is not used: it makes an array per element of every list, so that a vocabulary of 2.5 MB took
16 s and 330 MB and a hostile list of 2 MB a minute and 1.4 GB; a list that claims more than the file holds never ends.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from moereplay.traces.importers.by_request import moe_layers
from moereplay.traces.profiles.contract import Counts, Form, check_size, checked
from moereplay.traces.schema import TraceError, shown

COUNTS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
ORDER = ("gate", "gate_up", "up", "down")  #: whose counts are taken, if they differ
KIND = "general.type"


def sniff(path: Path) -> bool:
    """Recognise any GGUF file, so that `read` can reject other kinds with a reason."""
    return path.is_file() and is_gguf(path)


def read(path: Path) -> Counts:
    """Read the tokens of each expert. Raises TraceError for a GGUF file without counts of experts."""
    gguf = read_gguf(path)
    if gguf.metadata.get(KIND) != "imatrix":
        is_kind = f"{KIND} is {shown(gguf.metadata.get(KIND))}"
        raise TraceError(f"{path}: {is_kind}; expected imatrix, as llama-imatrix writes: weights do not count experts")
    layers = _layers(gguf)
    if not layers:
        raise TraceError(f"{path}: no counts of blk.N.ffn_*_exps; expected those of a Mixture-of-Experts model")
    experts = {len(found) for found in layers.values()}
    if experts == {1}:
        raise TraceError(f"{path}: a count per tensor, none per expert, as of the .dat form; run llama-imatrix anew")
    if len(experts) > 1:
        raise TraceError(
            f"{path}: layers of {' and '.join(map(str, sorted(experts)))} experts; expected as many in each"
        )
    _, said = moe_layers(np.array(list(layers)))
    return checked(path, np.stack(list(layers.values())), (*_notes(gguf, len(layers)), *said))


def _layers(gguf: Gguf) -> dict[int, np.ndarray]:
    """Return (E,) counts by layer, ascending. Raises TraceError if two tensors of one layer disagree."""
    names = sorted(
        (int(found[1]), ORDER.index(found[2]), name) for name in gguf.tensors if (found := COUNTS.fullmatch(name))
    )
    layers: dict[int, np.ndarray] = {}
    widest = max((math.prod(gguf.tensors[name].shape) for _, _, name in names), default=1)
    check_size(gguf.path, len({layer for layer, _, _ in names}) or 1, widest)
    for layer, _, name in names:
        counts = gguf.floats(name).ravel()
        if layer in layers and not np.array_equal(layers[layer], counts):
            raise TraceError(f"{gguf.path}: {name} is not what the layer's other tensors count; expected equal counts")
        layers.setdefault(layer, counts)
    return layers


def _notes(gguf: Gguf, layers: int) -> tuple[str, ...]:
    chunks, tokens = (gguf.metadata.get(f"imatrix.chunk_{key}") for key in ("count", "size"))
    said = f"tokens per expert of {layers} layers, an importance matrix of llama.cpp"
    if isinstance(chunks, int) and isinstance(tokens, int):
        said += f" over {chunks:,} chunks of {tokens:,} tokens"
    return (said,)


FORM = Form(
    name="imatrix",
    summary="importance matrix of llama.cpp: tokens of each expert",
    formats="FILE.gguf of llama-imatrix, with blk.N.ffn_*_exps.weight.counts",
    sniff=sniff,
    read=read,
)


# -- GGUF containers, versions 2 and 3: metadata and tensors of float32, read within the size of the file.

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, ALIGNED = "general.alignment", 32
MOST_ALIGNMENT = 1 << 16
#: Kinds of metadata by number, as `struct` names them; 8 is a text and 9 a list.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
KEPT = 64  #: elements of a list that are kept; the others, of a vocabulary, are passed over
MOST_AXES = 4
FLOAT32 = 0


@dataclass(frozen=True)
class Tensor:
    """Place of a tensor. `shape` begins with the fastest axis; `offset` is relative to the first tensor."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Gguf:
    """Metadata of a file and places of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    start: int  #: byte of the first tensor

    def floats(self, name: str) -> np.ndarray:
        """Read a float32 tensor, slowest axis first. Raises TraceError for another kind, or beyond the file's end."""
        tensor = self.tensors[name]
        count, at = math.prod(tensor.shape), self.start + tensor.offset
        if tensor.kind != FLOAT32:
            raise TraceError(f"{self.path}: tensor {shown(name)} is of kind {tensor.kind}; expected float32 (0)")
        if at + count * 4 > self.path.stat().st_size:
            raise TraceError(f"{self.path}: tensor {shown(name)} ends beyond the file; was it cut off? Copy it again")
        return np.fromfile(self.path, "<f4", count, offset=at).reshape(tensor.shape[::-1])


def is_gguf(path: Path) -> bool:
    """Return True if the file begins with GGUF's magic number."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> Gguf:
    """Read metadata and places of tensors. Raises TraceError for another or a truncated file."""
    with path.open("rb") as stream:
        reader = _Reader(stream, path)
        if reader.take(len(MAGIC)) != MAGIC:
            raise TraceError(f"{path}: does not begin with {MAGIC.decode()}; expected a GGUF file")
        version = reader.number("I")
        if version not in VERSIONS:
            raise TraceError(f"{path}: GGUF version {version}; expected 2 or 3, little-endian")
        tensors, keys = reader.number("Q"), reader.number("Q")
        metadata = dict(reader.times(keys, reader.entry))
        found = dict(reader.times(tensors, reader.tensor))
        return Gguf(path, metadata, found, _aligned(path, reader.at, metadata.get(ALIGNMENT, ALIGNED)))


def _aligned(path: Path, at: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
        raise TraceError(f"{path}: {ALIGNMENT} is {shown(alignment)}; expected 1 to {MOST_ALIGNMENT}")
    return -(-at // alignment) * alignment


class _Reader:
    """Reads values at the next byte, and never beyond the end of the file."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path, self._size = stream, path, path.stat().st_size
        self.at = 0

    def take(self, count: int) -> bytes:
        """Read `count` bytes."""
        self._refuse_beyond(count)
        self.at += count
        return self._stream.read(count)

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        self._refuse_beyond(count)
        self.at += count
        self._stream.seek(self.at)

    def _refuse_beyond(self, count: int) -> None:
        if count > self._size - self.at:
            raise TraceError(f"{self._path}: byte {self.at:,} promises {count:,} more, the file ends; was it cut off?")

    def number(self, code: str) -> Any:
        """Read a number of a format of `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """Read a length and then that many bytes of UTF-8."""
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def times(self, count: int, read: Callable[[], tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Read `count` entries, each of at least one byte."""
        self._refuse_beyond(count)
        return [read() for _ in range(count)]

    def entry(self) -> tuple[str, Any]:
        """Read a key and its value."""
        key = self.text()
        return key, self._value(self.number("I"), key)

    def _value(self, kind: int, key: str) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            raise TraceError(f"{self._path}: {shown(key)} is of kind {kind}; expected 0 to 12: damaged")
        return self._list(self.number("I"), self.number("Q"), key)

    def _list(self, kind: int, count: int, key: str) -> list[Any]:
        """Read the first elements of a list and skip the others; nested lists are rejected."""
        if kind in SCALARS:
            size = struct.calcsize(f"<{SCALARS[kind]}")
            kept = [self.number(SCALARS[kind]) for _ in range(min(count, KEPT))]
            self.skip((count - len(kept)) * size)
            return kept
        if kind != TEXT:
            raise TraceError(f"{self._path}: {shown(key)} is a list of kind {kind}; expected numbers or texts")
        self._refuse_beyond(count)
        kept = [self.text() for _ in range(min(count, KEPT))]
        for _ in range(count - len(kept)):
            self.skip(self.number("Q"))
        return kept

    def tensor(self) -> tuple[str, Tensor]:
        """Read a tensor's name and place."""
        name, axes = self.text(), self.number("I")
        if not 0 < axes <= MOST_AXES:
            raise TraceError(f"{self._path}: tensor {shown(name)} has {axes} axes; expected 1 to {MOST_AXES}: damaged")
        shape = tuple(self.number("Q") for _ in range(axes))
        return name, Tensor(shape, self.number("I"), self.number("Q"))
