"""A trace store: the group's attributes, the layout of every array, the digest over both; one array's rows.

An array whose metadata document is exactly what our writer produces is checked without zarr, whose import takes as long
as a short replay; most replays then map files derived from the rows (`traces/derived.py`) and never read the array.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, ValidationError, model_validator

from moereplay.traces.documents import DocumentError, Sparse, content, first_fault, from_json
from moereplay.traces.files import SAMPLE
from moereplay.traces.schema import (
    FORMAT_VERSION,
    LOOKAHEAD,
    TOKEN_ARRAYS,
    Frozen,
    Geometry,
    Header,
    TraceError,
    canonical_digest,
    dtype_of,
    row_shape,
    shown,
)
from moereplay.traces.texts import nearest
from moereplay.traces.values import DRAFT, of_rejected

if TYPE_CHECKING:
    import zarr

FORMAT = "moereplay-trace"
PARTIAL = ".partial"
FROM_FILE = (
    "`moereplay import` converts a log, `moereplay synthesise --model` makes a trace from a config.json or GGUF file"
)
OFFSETS, PROMPTS, BIAS = "request_offsets", "prompt_lengths", "router_bias"
SHARD_TOKENS = 512  #: default, unless the first request is long
LONG_REQUEST = 1 << 20  #: tokens; files of 512 would be thousands
LONG_SHARD, LONG_FILE = 1 << 16, 1 << 22  #: the most tokens in a file of a long request, and its most bytes
CHUNKS_PER_SHARD = 8
VECTOR_FACTOR = 16  #: shards of arrays with one value per row are longer by this factor, or their files would be tiny
MOST_SHARD_TOKENS = 1 << 20  #: limit, so that a store that claims many tokens must have many files


class Committed(Sparse):
    """Tokens and requests that readers see; later rows are the unfinished tail of a killed writer."""

    later: ClassVar[frozenset[str]] = frozenset({"rejected"})

    tokens: int = Field(default=0, ge=0)
    requests: int = Field(default=0, ge=0)
    rejected: int = Field(default=0, ge=0)  #: rows of rejected drafts

    def with_requests(self, requests: int, tokens: int, rejected: int) -> Committed:
        """Return the counts after so many more requests and rejected rows, with `tokens` in all."""
        return Committed(tokens=tokens, requests=self.requests + requests, rejected=self.rejected + rejected)


class Attributes(Frozen):
    """Attributes of the group; `arrays` maps each array to the sha256 of its committed rows."""

    header: Header
    shard_tokens: int = Field(ge=8, le=MOST_SHARD_TOKENS, multiple_of=8)
    format: str = FORMAT
    version: int = Field(default=FORMAT_VERSION, ge=1)
    committed: Committed = Committed()
    arrays: dict[str, str] = Field(default_factory=dict)
    digest: str = ""

    @model_validator(mode="after")
    def _known_arrays(self) -> Attributes:
        required = {"chosen", OFFSETS, PROMPTS} if self.committed.requests else set()
        required |= {f"{LOOKAHEAD}{depth}" for depth in range(1, self.header.lookahead_depth + 1) if required}
        required |= {f"{DRAFT}{name}" for name in of_rejected(self.arrays)}
        wrong = (required - self.arrays.keys()) | (self.arrays.keys() - required - {*TOKEN_ARRAYS, BIAS})
        if wrong:
            raise ValueError(f"arrays lack, or should not have, {', '.join(sorted(wrong))}")
        return self


def partial_of(path: Path) -> Path:
    """Return the path of the unfinished store."""
    return Path(f"{path}{PARTIAL}")


def read_attributes(path: Path) -> Attributes:
    """Read the group's attributes and check `digest`. Raises TraceError if they are missing, foreign or damaged."""
    _check_folder(path)
    group = document_of(path, "zarr.json")
    stored = group.get("attributes")
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise TraceError(f"{path} is a Zarr group, expected a {FORMAT}; convert it with `moereplay import`")
    _check_version(path, stored.get("version"))
    try:
        attributes = Attributes.model_validate(stored)
    except ValidationError as invalid:
        wrong = first_fault(invalid)
        raise TraceError(
            f"{path}: attributes: {wrong}; the trace was edited or damaged: restore it from a copy"
        ) from None
    if metadata_digest(path, group) != attributes.digest:
        raise TraceError(f"{path}: attributes or metadata were edited or damaged; restore the trace from a copy")
    return attributes


def metadata_digest(path: Path, group: dict[str, Any]) -> str:
    """Return the sha256 over the group's document without its digest, and over every array's document.

    Shapes are left out: arrays of a partial store are longer than `committed`, and opening checks shapes anyway.
    """
    attributes = {key: value for key, value in group["attributes"].items() if key != "digest"}
    nodes = {name for array in attributes["arrays"] for name in (array, array.rpartition("/")[0]) if name}
    documents = {name: document_of(path, f"{name}/zarr.json") | {"shape": None} for name in nodes}
    return canonical_digest([group | {"attributes": attributes}, documents])


def layout(name: str, geometry: Geometry) -> tuple[str, tuple[int, ...]]:
    """Return dtype and row shape of any array of the store."""
    if name in (OFFSETS, PROMPTS):
        return "<i8", ()
    if name == BIAS:
        return "<f4", (geometry.experts,)
    return dtype_of(name), row_shape(name, geometry)


def rows_per_file(name: str, attributes: Attributes) -> tuple[int, int]:
    """Return the rows of an array's shards and of the chunks in them."""
    shard = attributes.shard_tokens * (1 if layout(name, attributes.header.geometry)[1] else VECTOR_FACTOR)
    return shard, shard // CHUNKS_PER_SHARD


def with_longer_files(attributes: Attributes, tokens: int, widest: int) -> Attributes:
    """Return the attributes of a store whose first request has so many tokens, of `widest` bytes in one array.

    Only the default number of tokens in a file grows, and only for requests of a million tokens and more.
    """
    if tokens < LONG_REQUEST or attributes.shard_tokens != SHARD_TOKENS:
        return attributes
    fitting = min(LONG_SHARD, LONG_FILE // max(widest, 1)) // SHARD_TOKENS * SHARD_TOKENS
    return attributes.model_copy(update={"shard_tokens": max(fitting, SHARD_TOKENS)})


def committed_rows(name: str, attributes: Attributes) -> int:
    """Return the number of committed rows of an array."""
    committed = attributes.committed
    if name.startswith(DRAFT):
        return committed.rejected
    whole = {OFFSETS: committed.requests + 1, PROMPTS: committed.requests, BIAS: attributes.header.geometry.layers}
    return whole.get(name, committed.tokens)


def _check_folder(path: Path) -> None:
    if not path.exists() and partial_of(path).exists():
        raise TraceError(
            f"{path} is not finished: rerun its recording with --resume, or open the committed part, {partial_of(path)}"
        )
    if not path.exists() and str(path) == SAMPLE:
        raise TraceError(f"{SAMPLE} is bundled and cannot be changed: copy it first: moereplay traces get {SAMPLE}")
    if not path.exists():
        beside = sorted(each.name for each in path.parent.glob("*.zarr")) if path.parent.is_dir() else []
        near = nearest(path.name, [*beside, SAMPLE])  # the bundled trace has its name in every folder
        meant = path.with_name(near) if near and near != SAMPLE else near
        raise TraceError(f"{path} does not exist; {f'did you mean {meant}?' if meant else 'check the path'}")
    if not path.is_dir():
        raise TraceError(f"{path} is a file, expected a trace, the folder of a Zarr v3 group: {FROM_FILE}")
    if not (path / "zarr.json").exists():
        raise TraceError(f"{path} has no zarr.json, expected a Zarr v3 group; check the path or `moereplay import` it")


def _check_version(path: Path, version: object) -> None:
    if not isinstance(version, int):
        raise TraceError(f"{path}: version is {version!r}, expected a number; the attributes were edited or damaged")
    if version > FORMAT_VERSION:
        raise TraceError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}; upgrade moereplay")


def document_of(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON document of the store. Raises TraceError if it is missing or damaged."""
    try:
        document = from_json(content(path / name))
    except (OSError, DocumentError) as broken:
        reason = broken.strerror if isinstance(broken, OSError) else broken
        raise TraceError(f"{path}: {name} is missing or damaged ({reason}); restore the trace from a copy") from None
    if not isinstance(document, dict):
        raise TraceError(f"{path}: {name} is damaged (not a JSON object); restore the trace from a copy")
    return document


# -- One array

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

    def __repr__(self) -> str:
        return f"<Stored {self.name} of {shown(self.path.name)}: {self.dtype} {(self.rows, *self.row)}>"

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
