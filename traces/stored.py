"""One array of a trace store: check it, read its rows, append to it.

An array whose metadata document is exactly what our writer produces is checked without zarr, whose import takes as long
as a short replay; most replays then map files derived from the rows (`traces/derived.py`) and never read the array.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moereplay.traces.metadata import Attributes, committed_rows, document_of, layout, rows_per_file
from moereplay.traces.schema import TraceError, shown

if TYPE_CHECKING:
    import zarr


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


class Stored:
    """A stored array whose metadata and files have been checked; rows are decoded when they are read."""

    def __init__(self, path: Path, name: str, attributes: Attributes) -> None:
        """Raise TraceError if the array's document contradicts the attributes, or if a file is missing."""
        self.path, self.name = path, name
        self._attributes = attributes
        dtype, self.row = layout(name, attributes.header.geometry)
        self.dtype, self.rows = np.dtype(dtype), committed_rows(name, attributes)
        if not self._is_as_written(document_of(path, f"{name}/zarr.json")):
            self.opened  # noqa: B018 - let zarr decide whether this other document can be used
        self._check_files()

    @cached_property
    def opened(self) -> zarr.Array:
        """The array, opened with zarr. Raises TraceError."""
        import zarr

        path, name = self.path, self.name
        try:
            array = zarr.open_array(path / name, mode="r", zarr_format=3)
            found_files = array.shards, array.chunks
        except Exception as broken:  # zarr may raise anything for damaged metadata
            raise TraceError(f"{path}: {name}/zarr.json is not usable ({shown(broken)}); restore the trace") from broken
        if array.dtype != self.dtype or array.shape[1:] != self.row or not self._has_grown_to(array.shape[0]):
            found, expected = f"{array.dtype} {array.shape}", f"{self.dtype} {(self.rows, *self.row)}"
            raise TraceError(f"{path}: {name} is {found}, expected {expected}; restore the trace from a copy")
        shard, chunk = rows_per_file(name, self._attributes)
        if found_files != ((shard, *self.row), (chunk, *self.row)):
            found, expected = "{} of {}".format(*found_files), f"{(shard, *self.row)} of {(chunk, *self.row)}"
            raise TraceError(f"{path}: {name} has shards {found}, expected {expected}; restore the trace from a copy")
        return array

    def files(self) -> list[str]:
        """Return the names of the files that hold the committed rows."""
        count = -(-self.rows // rows_per_file(self.name, self._attributes)[0])
        if "opened" in self.__dict__:
            metadata = self.opened.metadata
            return [metadata.encode_chunk_key((index, *[0] * len(self.row))) for index in range(count)]
        return [".".join(["c", str(index), *["0"] * len(self.row)]) for index in range(count)]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Read rows. Raises TraceError, or the errors of zarr and its codecs for damaged bytes."""
        return np.asarray(self.opened[rows])

    def _has_grown_to(self, rows: int) -> bool:
        return rows >= self.rows  # a killed writer may have left rows after the committed ones

    def _is_as_written(self, document: dict[str, Any]) -> bool:
        """Return True if the document is exactly what `create_column` makes."""
        written = _document(self.dtype, self.row, *rows_per_file(self.name, self._attributes))
        shape, fill = document.get("shape"), document.get("fill_value")
        return (
            isinstance(shape, list)
            and all(type(length) is int for length in shape)
            and len(shape) == 1 + len(self.row)
            and shape[1:] == list(self.row)
            and self._has_grown_to(shape[0])
            and type(fill) in (int, float)
            and fill == 0
            and document == written | {"shape": shape, "fill_value": fill}
        )

    def _check_files(self) -> None:
        """Check that every file exists: zarr would read a missing file, or a folder in its place, as zeros."""
        with os.scandir(self.path / self.name) as entries:
            sizes = {entry.name: entry.stat().st_size if entry.is_file() else -1 for entry in entries}
        for file in self.files():
            if sizes.get(file, 0) <= 0:
                state = {None: "missing", 0: "empty"}.get(sizes.get(file), "not a file")
                raise TraceError(f"{self.path}: {self.name}/{file} is {state}; restore the trace from a copy")


def _document(dtype: np.dtype, row: tuple[int, ...], shard: int, chunk: int) -> dict[str, Any]:
    """Return the metadata document of an array that `create_column` makes, without shape and fill value."""
    blosc = {"typesize": dtype.itemsize, "cname": "zstd", "clevel": 3, "shuffle": "shuffle", "blocksize": 0}
    values = LITTLE if dtype.itemsize > 1 else {"name": "bytes"}
    inner = [values, {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": [chunk, *row],
        "codecs": inner,
        "index_codecs": [LITTLE, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard, *row]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


class Column:
    """Appends to one array. Writes start at a shard boundary, so a file is replaced as a whole."""

    def __init__(self, array: zarr.Array) -> None:
        self.array = array.with_config({"write_empty_chunks": True})  # readers treat a missing file as damage
        self.shard = (array.shards or array.chunks)[0]
        self.hasher = hashlib.sha256()
        self.rows = 0
        self.written = 0
        self.tail: list[np.ndarray] = []  #: rows since the last shard boundary, written or not

    @property
    def waiting(self) -> int:
        """Rows that are only in memory."""
        return self.rows - self.written

    def extend(self, rows: np.ndarray) -> None:
        """Buffer a copy of the rows; the caller may reuse its arrays."""
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
        self._mark_written(tail)

    def restore(self, committed: Iterable[np.ndarray]) -> None:
        """Continue after a killed writer: hash the committed rows, buffer the last shard, cut off later rows."""
        for rows in committed:
            self.hasher.update(rows.data)
            self.rows += len(rows)
            self._mark_written(np.concatenate([*self.tail, rows]))
        self.array.resize((self.rows, *self.array.shape[1:]))

    def cut(self, rows: int) -> None:
        """Cut off the array after `rows` rows; nothing may be appended afterwards. Raises OSError."""
        self.array.resize((rows, *self.array.shape[1:]))

    def _mark_written(self, tail: np.ndarray) -> None:
        self.written = self.rows
        self.tail = [tail[len(tail) - self.rows % self.shard :].copy()]


def create_column(root: Path, name: str, attributes: Attributes) -> Column:
    """Create an empty array in the store at `root`. Raises OSError."""
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec

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
    """Open an array that a killed writer left, and cut it back to its committed rows. Raises OSError."""
    import zarr

    column = Column(zarr.open_array(root / name, mode="r+", zarr_format=3))
    column.restore(committed)
    return column
