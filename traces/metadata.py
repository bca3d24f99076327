"""Metadata of a trace store: the group's attributes, the layout of every array, and the digest over both."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from moereplay.traces.documents import DocumentError, content, from_json
from moereplay.traces.frozen import Sparse, first_fault
from moereplay.traces.installation import SAMPLE
from moereplay.traces.schema import (
    FORMAT_VERSION,
    LOOKAHEAD,
    TOKEN_ARRAYS,
    Frozen,
    Geometry,
    Header,
    TraceError,
    canonical,
    dtype_of,
    row_shape,
)
from moereplay.traces.texts import nearest
from moereplay.traces.values import DRAFT, of_rejected

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
    return hashlib.sha256(canonical([group | {"attributes": attributes}, documents])).hexdigest()


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
