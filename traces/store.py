"""Open a trace on disk: a Zarr v3 group that is checked when it is opened and whose rows are read on demand.

`traces/writer.py` describes the layout. `digest` covers attributes and array metadata, a crc32c covers each chunk, and
one sha256 per array covers the decoded rows (`verify`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from moereplay.traces.files import bundled, private_folder, write_whole
from moereplay.traces.pieces import check_bias
from moereplay.traces.schema import Geometry, Trace, TraceError, check_rows
from moereplay.traces.stored import BIAS, OFFSETS, PARTIAL, PROMPTS, Attributes, Stored, read_attributes
from moereplay.traces.values import DRAFT, of_rejected

BLOCK_TOKENS = 2048  #: rows hashed at a time; a multiple of the default shard, so that no chunk is decoded twice


@dataclass(frozen=True)
class Rows:
    """The committed rows of a stored array, (rows, ...). A slice reads only the chunks it touches.

    The values are checked as well, because engines index by them and a checksum only shows that they were not changed.
    """

    array: Stored
    rows: int
    name: str
    geometry: Geometry
    path: Path

    def __repr__(self) -> str:
        return repr(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the committed rows."""
        return (self.rows, *self.array.row)

    @property
    def dtype(self) -> np.dtype:
        """The dtype on disk."""
        return self.array.dtype

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = slice(rows.start, rows.stop).indices(self.rows)
        read = self.array[start : max(start, stop)]
        check_rows(self.name, read, self.geometry, f"{self.path}: ", start)
        return read[:: rows.step]


def open_trace(path: str | Path) -> Trace:
    """Open `X.zarr`, the committed part of `X.zarr.partial` (then `complete` is False), or the bundled `miniature`.

    Raises TraceError if the path is not a moereplay trace, or if anything but its rows is damaged. Rows are read
    lazily: damaged ones raise TraceError when they are read, and `verify` reads them all.
    """
    path = bundled(Path(path))
    attributes = read_attributes(path)
    if not attributes.committed.requests:
        raise TraceError(f"{path} holds no committed request; rerun the recording with --resume, or remove it")
    arrays = {name: Stored(path, name, attributes) for name in sorted(attributes.arrays)}
    offsets, prompts = _request_ranges(path, arrays, attributes)
    committed, geometry = attributes.committed, attributes.header.geometry
    rejected = of_rejected(arrays)
    return Trace(
        header=attributes.header,
        request_offsets=offsets,
        prompt_lengths=prompts,
        arrays={
            name: Rows(array, committed.tokens, name, geometry, path)
            for name, array in arrays.items()
            if name not in (OFFSETS, PROMPTS, BIAS) and not name.startswith(DRAFT)
        },
        digest=attributes.digest,
        path=path,
        router_bias=_router_bias(path, arrays[BIAS], attributes) if BIAS in arrays else None,
        complete=path.suffix != PARTIAL,
        array_digests=attributes.arrays,
        rejects=committed.rejected,
        rejected={
            name: Rows(arrays[f"{DRAFT}{name}"], committed.rejected, f"{DRAFT}{name}", geometry, path)
            for name in rejected
        },
    )


def verify(trace: Trace) -> None:
    """Read every row and compare it with the recorded sha256; check that recorded drafts fit together.

    Raises TraceError naming the first array that differs.
    """
    for name, recorded in trace.array_digests.items():
        hasher = hashlib.sha256()
        for rows in blocks(trace, name):
            hasher.update(rows.data)
        if hasher.hexdigest() != recorded:
            raise TraceError(f"{trace.path}: {name} does not match its recorded sha256; restore the trace from a copy")
    trace.verified  # noqa: B018 - reads and checks drafts


def blocks(trace: Trace, name: str) -> Iterator[np.ndarray]:
    """Yield the committed rows of any array of the store in order, a block at a time."""
    whole = {OFFSETS: trace.request_offsets, PROMPTS: trace.prompt_lengths, BIAS: trace.router_bias}
    if name in whole:
        yield np.ascontiguousarray(whole[name])
        return
    first, last = (trace.tokens, trace.rows) if name.startswith(DRAFT) else (0, trace.tokens)
    for start in range(first, last, BLOCK_TOKENS):
        yield trace.read(name.removeprefix(DRAFT), start, min(start + BLOCK_TOKENS, last))


def files_of(trace: Trace) -> list[str]:
    """Return the sorted paths of a stored trace's files relative to its folder, without unrelated files.

    Raises TraceError for a link, a pipe or a device in place of a file: a trace may come from an untrusted source.
    """
    if trace.path is None:
        return []
    attributes = read_attributes(trace.path)
    found = {"zarr.json"}
    for name in attributes.arrays:
        found |= {f"{group}/zarr.json" for group in (name, name.rpartition("/")[0]) if group}
        found |= {f"{name}/{file}" for file in Stored(trace.path, name, attributes).files()}
    for name in found:
        _refuse_irregular(trace.path, name)
    return sorted(found)


def _refuse_irregular(folder: Path, name: str) -> None:
    path = folder
    for part in name.split("/"):
        path /= part
        if path.is_symlink():
            raise TraceError(f"{path} is a link, expected a file of the trace; put the file in its place")
    if not path.is_file():
        raise TraceError(f"{path} is not a file; restore the trace from a copy")


# -- Small arrays that opening reads whole. Decoding them needs zarr, so a copy is kept in the user's cache

MOST_COPIED = 1 << 20  #: bytes of a copy


def _router_bias(path: Path, array: Stored, attributes: Attributes) -> np.ndarray:
    """Return the correction bias (L, E). Raises TraceError if it is damaged or out of range."""
    bias = _values(path, array, attributes)
    check_bias(bias, str(path))
    return bias


def _request_ranges(path: Path, arrays: dict[str, Stored], attributes: Attributes) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets (R + 1,) and prompt lengths (R,). Raises TraceError if they are damaged or inconsistent."""
    offsets, prompts = (_values(path, arrays[name], attributes) for name in (OFFSETS, PROMPTS))
    lengths, tokens = np.diff(offsets), attributes.committed.tokens
    if offsets[0] != 0 or offsets[-1] != tokens or (lengths < 1).any():
        raise TraceError(f"{path}: {OFFSETS} do not rise from 0 to {tokens}; restore the trace from a copy")
    if (prompts < 0).any() or (prompts > lengths).any():
        raise TraceError(f"{path}: {PROMPTS} exceed the lengths of their requests; restore the trace from a copy")
    return offsets, prompts


def _values(path: Path, array: Stored, attributes: Attributes) -> np.ndarray:
    size = array.rows * array.dtype.itemsize * prod(array.row)
    if path.suffix == PARTIAL or size > MOST_COPIED:
        return _decoded(path, array)
    copy, recorded = _copy_of(path, array), attributes.arrays[array.name]
    with suppress(OSError):
        content = copy.read_bytes()
        if len(content) == size and hashlib.sha256(content).hexdigest() == recorded:
            return np.frombuffer(content, array.dtype).reshape(array.rows, *array.row)
    values = _decoded(path, array)
    content = np.ascontiguousarray(values).tobytes()
    if hashlib.sha256(content).hexdigest() == recorded:
        with suppress(OSError):
            write_whole(copy, content)
    return values


def _copy_of(path: Path, array: Stored) -> Path:
    """Return the path of the copy, named by the sha256 of the array's files. Raises TraceError."""
    hasher = hashlib.sha256()
    try:
        for file in array.files():
            hasher.update((path / array.name / file).read_bytes())
    except OSError as broken:
        raise _damaged(path, array, broken) from broken
    return private_folder("opened") / f"{array.name}-{hasher.hexdigest()[:32]}"


def _decoded(path: Path, array: Stored) -> np.ndarray:
    try:
        return array[: array.rows]
    except (ValueError, RuntimeError, OSError, MemoryError) as broken:
        raise _damaged(path, array, broken) from broken


def _damaged(path: Path, array: Stored, broken: Exception) -> TraceError:
    return TraceError(f"{path}: {array.name} is damaged ({broken}); restore the trace from a copy")
