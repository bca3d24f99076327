"""Read GGUF files of llama.cpp, versions 2 and 3: metadata and the places of tensors, without reading the weights.

The `gguf` package (0.19) is not used: it makes an array per element of every list, so that a vocabulary of 2.5 MB took
16 s and 330 MB and a hostile list of 2 MB a minute and 1.4 GB; a list that claims more than the file holds never ends.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moereplay.traces.documents import refuse_irregular
from moereplay.traces.schema import MOST_LAYERS, TraceError, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, ALIGNED = "general.alignment", 32
MOST_ALIGNMENT = 1 << 16
#: Kinds of metadata by number, as `struct` names them; 8 is a text and 9 a list.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
KEPT = MOST_LAYERS  #: elements of a list that are kept, one for each layer; the others, of a vocabulary, are skipped
MOST_AXES, MOST_WEIGHTS = 4, 1 << 60
FLOAT32 = 0
#: Tensor types by number: name, weights of a block, and its bytes (ggml-common.h). Others are refused by number.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    133: ("Q6_0", 32, 26),  # from here on of ik_llama.cpp
    137: ("IQ2_K", 256, 76),
    138: ("IQ3_K", 256, 110),
    139: ("IQ4_K", 256, 144),
    140: ("IQ5_K", 256, 176),
    141: ("IQ6_K", 256, 212),
}


@dataclass(frozen=True)
class Tensor:
    """Place of a tensor. `shape` begins with the fastest axis; `offset` is relative to the first tensor."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes as stored. Raises KeyError for an unknown type."""
        _, block, size = TYPES[self.kind]
        return -(-self.weights // block) * size


@dataclass(frozen=True)
class Gguf:
    """Metadata of a file and places of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    start: int  #: byte of the first tensor

    def check_whole(self) -> None:
        """Raises TraceError for a tensor of an unknown type, or one that ends beyond the file."""
        size = self.path.stat().st_size
        for name, tensor in self.tensors.items():
            if tensor.kind not in TYPES:
                raise TraceError(f"{self.path}: {shown(name)} has the unknown type {tensor.kind}")
            if self.start + tensor.offset + tensor.size > size:
                raise self._truncated(name)

    def _truncated(self, name: str) -> TraceError:
        return TraceError(f"{self.path}: tensor {shown(name)} ends beyond the file: it is truncated; copy it again")

    def floats(self, name: str) -> np.ndarray:
        """Read a float32 tensor, slowest axis first. Raises TraceError for another kind, or beyond the file's end."""
        tensor = self.tensors[name]
        count, at = math.prod(tensor.shape), self.start + tensor.offset
        if tensor.kind != FLOAT32:
            raise TraceError(f"{self.path}: tensor {shown(name)} has type {tensor.kind}: expected float32 (0)")
        if at + count * 4 > self.path.stat().st_size:
            raise self._truncated(name)
        return np.fromfile(self.path, "<f4", count, offset=at).reshape(tensor.shape[::-1])


def is_gguf(path: Path) -> bool:
    """Return True if the file begins with GGUF's magic number. Raises TraceError for a pipe or a device."""
    try:
        refuse_irregular(path)
    except OSError as wrong:
        raise TraceError(f"{path}: {wrong.strerror}") from None
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> Gguf:
    """Read metadata and places of tensors. Raises TraceError for another or a truncated file."""
    with path.open("rb") as stream:
        return read_header(stream, path, path.stat().st_size)


def read_header(stream: BinaryIO, path: Path, size: int) -> Gguf:
    """Read metadata and places of tensors from a stream of `size` bytes. Raises TraceError as `read_gguf` does."""
    reader = _Reader(stream, path, size)
    if reader.take(len(MAGIC)) != MAGIC:
        raise TraceError(f"{path}: not a GGUF file: expected {MAGIC.decode()} as its first bytes")
    version = reader.number("I")
    if version not in VERSIONS:
        raise TraceError(f"{path}: invalid GGUF version {version}: expected 2 or 3, little-endian")
    tensors, keys = reader.number("Q"), reader.number("Q")
    metadata = reader.table(keys, reader.entry, "key")
    found = reader.table(tensors, reader.tensor, "tensor")
    return Gguf(path, metadata, found, _aligned(path, reader.at, metadata.get(ALIGNMENT, ALIGNED)))


def _aligned(path: Path, at: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
        raise TraceError(f"{path}: invalid {ALIGNMENT} {shown(alignment)}: expected 1 to {MOST_ALIGNMENT}")
    return -(-at // alignment) * alignment


class _Reader:
    """Reads values at the next byte, and never beyond the end of the file."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self._stream, self._path, self._size = stream, path, size
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
        if not self._size:
            raise TraceError(f"{self._path}: the file is empty: expected a GGUF file; download it again")
        if count > self._size - self.at:
            raise TraceError(
                f"{self._path}: byte {self.at:,} promises {count:,} more bytes than the file has: it is truncated"
            )

    def number(self, code: str) -> Any:
        """Read a number of a format of `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """Read a length and then that many bytes of UTF-8."""
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def table(self, count: int, read: Callable[[], tuple[str, Any]], what: str) -> dict[str, Any]:
        """Read `count` entries, each of at least one byte. Of a repeated name readers differ in which counts."""
        self._refuse_beyond(count)
        found: dict[str, Any] = {}
        for _ in range(count):
            name, value = read()
            if name in found:
                raise TraceError(f"{self._path}: the {what} {shown(name)} is repeated; the file is damaged")
            found[name] = value
        return found

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
            raise TraceError(
                f"{self._path}: invalid type {kind} of {shown(key)}: expected 0 to 12; the file is damaged"
            )
        return self._list(self.number("I"), self.number("Q"), key)

    def _list(self, kind: int, count: int, key: str) -> list[Any]:
        """Read the first elements of a list and skip the others; nested lists are rejected."""
        if kind in SCALARS:
            size = struct.calcsize(f"<{SCALARS[kind]}")
            kept = [self.number(SCALARS[kind]) for _ in range(min(count, KEPT))]
            self.skip((count - len(kept)) * size)
            return kept
        if kind != TEXT:
            raise TraceError(
                f"{self._path}: invalid element type {kind} of list {shown(key)}: expected numbers or strings"
            )
        self._refuse_beyond(count)
        kept = [self.text() for _ in range(min(count, KEPT))]
        for _ in range(count - len(kept)):
            self.skip(self.number("Q"))
        return kept

    def tensor(self) -> tuple[str, Tensor]:
        """Read a tensor's name and place."""
        name, axes = self.text(), self.number("I")
        if not 0 < axes <= MOST_AXES:
            raise TraceError(
                f"{self._path}: tensor {shown(name)} has {axes} axes: expected 1 to {MOST_AXES}; the file is damaged"
            )
        shape = tuple(self.number("Q") for _ in range(axes))
        if not 0 < math.prod(shape) <= MOST_WEIGHTS:
            raise TraceError(
                f"{self._path}: tensor {shown(name)} has the shape {shown(shape)}: expected 1 to 2^60 weights"
            )
        return name, Tensor(shape, self.number("I"), self.number("Q"))
