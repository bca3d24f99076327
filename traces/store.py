"""Read a trace from disk: a Zarr v3 group that is checked when opened and whose rows are read on demand.

`traces/writer.py` says how such a store is laid out and written. Attributes and array metadata are covered
by `digest`, the files by a crc32c per chunk, and the decoded rows by one sha256 per array (`verify`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from traces.bias import check_bias
from traces.metadata import (
    BIAS,
    OFFSETS,
    PARTIAL,
    PROMPTS,
    Attributes,
    Committed,
    committed_rows,
    layout,
    read_attributes,
    rows_per_file,
)
from traces.schema import Geometry, Trace, TraceError, check_rows, shown

BLOCK_TOKENS = 2048  #: rows hashed at a time; a multiple of the default shard, so that no chunk is decoded twice


@dataclass(frozen=True)
class Rows:
    """The committed rows of a stored array, (T, ...); a slice reads only the chunks it touches, and checks the rows.

    A checksum says that rows are what somebody wrote; engines index by them, so what they hold is checked as well.
    """

    array: zarr.Array
    tokens: int
    name: str
    geometry: Geometry
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the committed part."""
        return (self.tokens, *self.array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Stored dtype."""
        return np.dtype(self.array.dtype)

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = slice(rows.start, rows.stop).indices(self.tokens)
        read = np.asarray(self.array[start : max(start, stop)])
        check_rows(self.name, read, self.geometry, f"{self.path}: ", start)
        return read[:: rows.step]


def open_trace(path: str | Path) -> Trace:
    """Open `X.zarr`, or the committed part of `X.zarr.partial` (then `complete` is False); rows are read lazily.

    Raises TraceError, one line, if the path is no trace of ours or anything but the rows themselves is damaged.
    Damaged rows raise when read; `verify` reads them all.
    """
    path = Path(path)
    attributes = read_attributes(path)
    if not attributes.committed.requests:
        raise TraceError(f"{path} holds no committed request; rerun the recording with --resume, or remove it")
    arrays = {name: _open_array(path, name, attributes) for name in sorted(attributes.arrays)}
    offsets, prompts = _request_ranges(path, arrays, attributes.committed)
    tokens = attributes.committed.tokens
    return Trace(
        header=attributes.header,
        request_offsets=offsets,
        prompt_lengths=prompts,
        arrays={
            name: Rows(array, tokens, name, attributes.header.geometry, path)
            for name, array in arrays.items()
            if name not in (OFFSETS, PROMPTS, BIAS)
        },
        digest=attributes.digest,
        path=path,
        router_bias=_router_bias(path, arrays[BIAS]) if BIAS in arrays else None,
        complete=path.suffix != PARTIAL,
        array_digests=attributes.arrays,
    )


def verify(trace: Trace) -> None:
    """Read every row and compare it with the recorded sha256. Raises TraceError naming the first array that differs."""
    for name, recorded in trace.array_digests.items():
        hasher = hashlib.sha256()
        for rows in blocks(trace, name):
            hasher.update(rows.data)
        if hasher.hexdigest() != recorded:
            raise TraceError(f"{trace.path}: {name} does not match its recorded sha256; restore the trace from a copy")


def blocks(trace: Trace, name: str) -> Iterator[np.ndarray]:
    """The committed rows of any array of the store, in order, a block at a time."""
    whole = {OFFSETS: trace.request_offsets, PROMPTS: trace.prompt_lengths, BIAS: trace.router_bias}
    if name in whole:
        yield np.ascontiguousarray(whole[name])
        return
    for start in range(0, trace.tokens, BLOCK_TOKENS):
        yield trace.read(name, start, min(start + BLOCK_TOKENS, trace.tokens))


def _open_array(path: Path, name: str, attributes: Attributes) -> zarr.Array:
    try:
        array = zarr.open_array(path / name, mode="r", zarr_format=3)
        found_files = array.shards, array.chunks
    except Exception as broken:  # foreign data in foreign code: it can be anything
        raise TraceError(f"{path}: {name}/zarr.json is not usable ({shown(broken)}); restore the trace") from broken
    dtype, row = layout(name, attributes.header.geometry)
    rows = committed_rows(name, attributes)
    grown = array.shape[0] >= rows if path.suffix == PARTIAL else array.shape[0] == rows
    if array.dtype != np.dtype(dtype) or array.shape[1:] != row or not grown:
        found, expected = f"{array.dtype} {array.shape}", f"{np.dtype(dtype)} {(rows, *row)}"
        raise TraceError(f"{path}: {name} is {found}, expected {expected}; restore the trace from a copy")
    shard, chunk = rows_per_file(name, attributes)
    if found_files != ((shard, *row), (chunk, *row)):
        found, expected = "{} of {}".format(*found_files), f"{(shard, *row)} of {(chunk, *row)}"
        raise TraceError(f"{path}: {name} has shards {found}, expected {expected}; restore the trace from a copy")
    _check_files(path, name, array, -(-rows // shard))
    return array


def _check_files(path: Path, name: str, array: zarr.Array, files: int) -> None:
    """Zarr reads a missing file as zeros, and a folder of its name as well, so every file must be there."""
    with os.scandir(path / name) as entries:
        sizes = {entry.name: entry.stat().st_size if entry.is_file() else -1 for entry in entries}
    for index in range(files):
        file = array.metadata.encode_chunk_key((index, *[0] * (array.ndim - 1)))
        if sizes.get(file, 0) <= 0:
            state = {None: "missing", 0: "empty"}.get(sizes.get(file), "no file")
            raise TraceError(f"{path}: {name}/{file} is {state}; restore the trace from a copy")


def _values(path: Path, name: str, array: zarr.Array, rows: int | None = None) -> np.ndarray:
    try:
        return np.asarray(array[:rows])
    except (ValueError, RuntimeError, OSError, MemoryError) as broken:
        raise TraceError(f"{path}: {name} is damaged ({broken}); restore the trace from a copy") from broken


def _router_bias(path: Path, array: zarr.Array) -> np.ndarray:
    bias = _values(path, BIAS, array)
    check_bias(bias, str(path))
    return bias


def _request_ranges(path: Path, arrays: dict[str, zarr.Array], committed: Committed) -> tuple[np.ndarray, np.ndarray]:
    offsets = _values(path, OFFSETS, arrays[OFFSETS], committed.requests + 1)
    prompts = _values(path, PROMPTS, arrays[PROMPTS], committed.requests)
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != committed.tokens or (lengths < 1).any():
        raise TraceError(f"{path}: {OFFSETS} do not rise from 0 to {committed.tokens}; restore the trace from a copy")
    if (prompts < 0).any() or (prompts > lengths).any():
        raise TraceError(f"{path}: {PROMPTS} exceed the lengths of their requests; restore the trace from a copy")
    return offsets, prompts
