"""Arrays that grow a block at a time along their first axis, in a .npy file or in memory.

Files are written with plain writes: pages of a memory map would count as memory of this process until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np

from moereplay.traces.schema import Trace
from moereplay.traces.stored import SHARD_TOKENS


class Rows(NamedTuple):
    """Dtype and shape of an array's rows."""

    dtype: str
    shape: tuple[int, ...] = ()  #: of one row


class Growing(Protocol):
    """An array that has `rows` rows so far."""

    rows: int

    def put(self, first: int, rows: np.ndarray) -> None:
        """Write rows from `first` on; beyond the end, the array grows."""
        ...

    def read(self, first: int, last: int) -> np.ndarray:
        """Return rows [first, last), which have been written."""
        ...


def append(array: Growing, rows: np.ndarray) -> None:
    """Write rows after the last one."""
    array.put(array.rows, rows)


class InFile:
    """Growing array in a .npy file. The header is padded, so that `finish` can write the final length.

    Blocks of zeros are skipped: the file stays sparse there, and reads as zeros.
    """

    def __init__(self, path: Path, of: Rows) -> None:
        self.path, self.of, self.rows = path, of, 0
        self._dtype = np.dtype(of.dtype)
        self._row_bytes = self._dtype.itemsize * int(np.prod(of.shape, dtype=np.int64))
        self._file = path.open("xb+")
        self._write_header()
        self.offset = self._file.tell()  #: of the first row, in bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array so far."""
        return (self.rows, *self.of.shape)

    def put(self, first: int, rows: np.ndarray) -> None:
        """Write rows from `first` on. Raises OSError."""
        if rows.any() or first < self.rows:
            self._file.seek(self.offset + first * self._row_bytes)
            self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self.rows = max(self.rows, first + len(rows))

    def read(self, first: int, last: int) -> np.ndarray:
        """Return rows [first, last). Raises OSError."""
        self._file.seek(self.offset + first * self._row_bytes)
        found = self._file.read((last - first) * self._row_bytes)
        zeros = bytes((last - first) * self._row_bytes - len(found))  # zeros at the end are not in the file yet
        return np.frombuffer(found + zeros, self._dtype).reshape(last - first, *self.of.shape)

    def finish(self) -> None:
        """Write the final header and length; skipped zeros at the end count through the length. Raises OSError."""
        self._file.truncate(self.offset + self.rows * self._row_bytes)
        self._file.seek(0)
        self._write_header()
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self._file, header)


class InMemory:
    """Growing array in memory, which doubles when it is full."""

    def __init__(self, of: Rows) -> None:
        self.rows = 0
        self._held = np.empty((0, *of.shape), of.dtype)

    @property
    def array(self) -> np.ndarray:
        """The rows so far, (rows, *shape)."""
        return self._held[: self.rows]

    def put(self, first: int, rows: np.ndarray) -> None:
        """Write rows from `first` on."""
        end = first + len(rows)
        if end > len(self._held):
            grown = np.empty((max(end, 2 * self.rows), *self._held.shape[1:]), self._held.dtype)
            grown[: self.rows] = self.array
            self._held = grown
        self._held[first:end] = rows
        self.rows = max(self.rows, end)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return rows [first, last)."""
        return self._held[first:last]


# -- Blocks of tokens, which bound the memory of every derivation

VALUES_AT_ONCE = 1 << 20  #: of one array; deriving from it takes some ten arrays of 64 bits, about 100 MB


def tokens_at_once(values: int) -> int:
    """Return the tokens of a block if each has `values` values: whole shards, so that no file is decoded twice."""
    return max(1, VALUES_AT_ONCE // values // SHARD_TOKENS) * SHARD_TOKENS


def token_blocks(trace: Trace, values: int, rows: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) that cover all tokens, or the first `rows` rows, each of `values` values."""
    size, end = tokens_at_once(values), trace.tokens if rows is None else rows
    for first in range(0, end, size):
        yield first, min(first + size, end)
