"""One array of a store: what it is, checked without zarr where its document is the writer's own; its rows, from zarr.

Importing zarr takes as long as a short replay, and most replays read plain files derived from the rows instead.
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
    """An array whose metadata and files are as they should be; rows are decoded when they are read."""

    def __init__(self, path: Path, name: str, attributes: Attributes) -> None:
        """Raises TraceError if the array's document is not what the attributes imply, or if a file is missing."""
        self.path, self.name = path, name
        self._attributes = attributes
        dtype, self.row = layout(name, attributes.header.geometry)
        self.dtype, self.rows = np.dtype(dtype), committed_rows(name, attributes)
        if not self._is_as_written(document_of(path, f"{name}/zarr.json")):
            self.opened  # noqa: B018 - zarr says what else it is, and whether that can be used
        self._check_files()

    @cached_property
    def opened(self) -> zarr.Array:
        """The array as zarr reads it. Raises TraceError."""
        import zarr

        path, name = self.path, self.name
        try:
            array = zarr.open_array(path / name, mode="r", zarr_format=3)
            found_files = array.shards, array.chunks
        except Exception as broken:  # foreign data in foreign code: it can be anything
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
        """Names of the files of the committed rows."""
        count = -(-self.rows // rows_per_file(self.name, self._attributes)[0])
        if "opened" in self.__dict__:
            metadata = self.opened.metadata
            return [metadata.encode_chunk_key((index, *[0] * len(self.row))) for index in range(count)]
        return [".".join(["c", str(index), *["0"] * len(self.row)]) for index in range(count)]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Raises TraceError, or what zarr and its codecs raise for damaged bytes."""
        return np.asarray(self.opened[rows])

    def _has_grown_to(self, rows: int) -> bool:
        """A writer that was killed, of a new trace or of more of it, may have left rows behind the committed ones."""
        return rows >= self.rows

    def _is_as_written(self, document: dict[str, Any]) -> bool:
        """Whether a document is the writer's, to the letter."""
        written = _written(self.dtype, self.row, *rows_per_file(self.name, self._attributes))
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
        """Zarr reads a missing file as zeros, and a folder of its name as well, so every file must be there."""
        with os.scandir(self.path / self.name) as entries:
            sizes = {entry.name: entry.stat().st_size if entry.is_file() else -1 for entry in entries}
        for file in self.files():
            if sizes.get(file, 0) <= 0:
                state = {None: "missing", 0: "empty"}.get(sizes.get(file), "no file")
                raise TraceError(f"{self.path}: {self.name}/{file} is {state}; restore the trace from a copy")


def _written(dtype: np.dtype, row: tuple[int, ...], shard: int, chunk: int) -> dict[str, Any]:
    """The document of an array as `traces/stored.py` makes it, without its shape."""
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


# -- Append to one array of a store, a whole number of files at a time.


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
    """An array that a killed writer left, cut back to its committed rows. Raises OSError."""
    import zarr

    column = Column(zarr.open_array(root / name, mode="r+", zarr_format=3))
    column.restore(committed)
    return column
