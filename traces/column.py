"""Append to one array of a store, a whole number of files at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from moereplay.traces.metadata import Attributes, layout, rows_per_file


class Column:
    """One array that grows along its first axis; writes start at a shard boundary, so a file is replaced as a whole."""

    def __init__(self, array: zarr.Array) -> None:
        self.array = array.with_config({"write_empty_chunks": True})  # a reader takes a missing file for damage
        self.shard = (array.shards or array.chunks)[0]
        self.hasher = hashlib.sha256()
        self.rows = 0
        self.written = 0
        self.tail: list[np.ndarray] = []  #: rows since the last shard boundary, written or not

    @property
    def waiting(self) -> int:
        """Rows that are in memory alone."""
        return self.rows - self.written

    def extend(self, rows: np.ndarray) -> None:
        """Buffer a copy of the rows: a recorder may reuse its arrays."""
        self.tail.append(rows.copy())
        self.rows += len(rows)

    def write(self) -> None:
        """Write the buffered rows; safe to repeat after an OSError."""
        if self.rows == self.written:
            return
        tail = np.concatenate(self.tail)
        start = self.rows - len(tail)
        self.array.resize((self.rows, *self.array.shape[1:]))
        self.array[start:] = tail
        self.hasher.update(tail[self.written - start :].data)
        self._written(tail)

    def restore(self, committed: Iterable[np.ndarray]) -> None:
        """Take up where a killed writer stopped: hash the committed rows, buffer the last ones, cut what follows."""
        for rows in committed:
            self.hasher.update(rows.data)
            self.rows += len(rows)
            self._written(np.concatenate([*self.tail, rows]))
        self.array.resize((self.rows, *self.array.shape[1:]))

    def cut(self, rows: int) -> None:
        """Give up what was written beyond so many rows; nothing may be added afterwards. Raises OSError."""
        self.array.resize((rows, *self.array.shape[1:]))

    def _written(self, tail: np.ndarray) -> None:
        self.written = self.rows
        self.tail = [tail[len(tail) - self.rows % self.shard :].copy()]


def create_column(root: Path, name: str, attributes: Attributes) -> Column:
    """An empty array of the store at `root`. Raises OSError."""
    dtype, row = layout(name, attributes.header.geometry)
    shard, chunk = rows_per_file(name, attributes)
    array = zarr.create_array(
        root,
        name=name,
        shape=(0, *row),
        shards=(shard, *row),
        chunks=(chunk, *row),
        dtype=dtype,
        filters=None,
        compressors=[BloscCodec(cname="zstd", clevel=3, shuffle="shuffle"), Crc32cCodec()],
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
        overwrite=True,
    )
    return Column(array)


def reopen_column(root: Path, name: str, committed: Iterable[np.ndarray]) -> Column:
    """An array that a killed writer left, cut back to its committed rows. Raises OSError."""
    column = Column(zarr.open_array(root / name, mode="r+", zarr_format=3))
    column.restore(committed)
    return column
