"""Libraries of traces: their index `traces.json`, where they are, and how a trace is published in one and fetched.

A library is bundled, a folder, or a data set on the hub. Every file is checked against its published sha256.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

import numpy as np
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from pydantic import Field, ValidationError, field_validator, model_validator

from moereplay.traces.documents import AT_ONCE, DocumentError, Frozen, Name, Text, content, first_fault, from_json
from moereplay.traces.files import (
    SAMPLE,
    bundled,
    leaving_no_folders,
    refuse_inside_trace,
    sha256_of,
    whole_folder,
    write_whole,
)
from moereplay.traces.lock import Lock, refuse_busy
from moereplay.traces.network import ANSWER_S, IDENTITY, snapshot
from moereplay.traces.schema import Request, Trace, TraceError, shown
from moereplay.traces.store import files_of, open_trace, verify
from moereplay.traces.stored import partial_of
from moereplay.traces.texts import hint, in_markdown
from moereplay.traces.units import MB
from moereplay.traces.values import DRAFT
from moereplay.traces.writer import write_trace

INDEX = "traces.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_BYTES = 1 << 26  #: of an index
SLOWEST = 1 << 18  #: bytes a second of a download that is waited for
MOST_CAPABILITIES = 100
SHA256 = r"^[0-9a-f]{64}$"


class File(Frozen):
    """A file of a published trace."""

    path: str  #: below the library, as NAME.zarr/chosen/c/0/0/0
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=SHA256)


class Entry(Frozen):
    """A published trace."""

    name: str
    model: Name
    licence: Name  #: an SPDX expression; empty if unknown
    requests: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=0)  #: of all files
    capabilities: tuple[Name, ...] = Field(max_length=MOST_CAPABILITIES)
    digest: str = Field(pattern=SHA256)
    source: Text = ""  #: origin of the routing, in words
    #: sha256 of the token ids of all prompts, which are not published
    prompts_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    files: tuple[File, ...] = ()

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        return checked_name(name)

    @model_validator(mode="after")
    def _files_are_its_own(self) -> Entry:
        for file in self.files:
            path = PurePosixPath(file.path)
            if path.parts[:1] != (folder_of(self.name),) or ".." in path.parts or len(path.parts) < 2:
                raise ValueError(f"invalid path {file.path!r}: expected a file in {folder_of(self.name)}")
        if self.files and sum(file.bytes for file in self.files) != self.bytes:
            raise ValueError(f"bytes is {self.bytes:,}, but its files have {sum(file.bytes for file in self.files):,}")
        return self

    def difference(self, trace: Trace) -> str:
        """Return in words the first field in which the trace differs from this entry; empty if none does."""
        found = described(trace, self.name)
        for name in ("digest", "model", "requests", "tokens", "capabilities"):
            stated, actual = getattr(self, name), getattr(found, name)
            if stated != actual:
                return f"{name} is {shown(stated)} in the index, {shown(actual)} in the trace"
        return ""


class Index(Frozen):
    """The index of a library."""

    format: Literal["moereplay-traces"] = "moereplay-traces"
    version: Literal[1] = 1
    traces: tuple[Entry, ...] = ()

    def entry(self, name: str, where: str) -> Entry:
        """Return the entry of that name. Raises TraceError naming the most similar one."""
        found = {trace.name: trace for trace in self.traces}
        if not found:
            raise TraceError(f"{where} has no traces: expected folders NAME.zarr, or an index; pass another --from")
        if name not in found:
            raise TraceError(f"{where} has no trace {name!r}: {hint(name, tuple(found))}")
        return found[name]


def checked_name(name: str) -> str:
    """Return the name. Raises ValueError unless it is a valid file name on every system."""
    if not NAME.fullmatch(name) or name.endswith((".", ".zarr")):
        raise ValueError(f"invalid name {name!r}: expected letters, digits, dots, - and _, without .zarr")
    return name


def folder_of(name: str) -> str:
    """Return the folder of a trace in its library."""
    return f"{name}.zarr"


def read_index(text: bytes, where: str) -> Index:
    """Parse an index. Raises TraceError naming the first invalid field."""
    try:
        return Index.model_validate(from_json(text))
    except DocumentError as broken:
        raise TraceError(f"{where}: {INDEX} cannot be read: {broken}") from None
    except ValidationError as wrong:
        raise TraceError(f"{where}: {INDEX}: {first_fault(wrong)}") from None


def described(trace: Trace, name: str, licence: str = "", source: str = "", prompts_sha256: str = "") -> Entry:
    """Return the entry of an opened trace, without its files."""
    said, folder = trace.header.provenance, trace.path or Path()
    return Entry(
        name=name,
        model=said.model,
        licence=licence,
        requests=trace.requests,
        tokens=trace.tokens,
        bytes=sum((folder / name).stat().st_size for name in files_of(trace)),
        capabilities=tuple(sorted(trace.capabilities)),
        digest=trace.digest,
        source=source or said.source,
        prompts_sha256=prompts_sha256,
    )


# -- Where a library is

HUB = "hf://datasets/"
OUR_LICENCE = "Apache-2.0"


class Library(Protocol):
    """Interface that `traces list` and `traces get` use."""

    @property
    def where(self) -> str:
        """Address of the library, as users type it."""
        ...

    def index(self) -> Index:
        """Return the index. Raises TraceError."""
        ...

    def folder(self, entry: Entry) -> Path:
        """Return the folder of a trace, downloaded if needed. Raises TraceError."""
        ...


def library_of(source: str | None) -> Library:
    """Return the library at an address, None for the bundled one. Raises TraceError for an unknown address."""
    if source is None:
        return Folder(bundled(Path(SAMPLE)).parent, "the bundled library", OUR_LICENCE)
    if Path(source).is_dir():
        return Folder(Path(source), source)
    identity = source.removeprefix(HUB)
    if IDENTITY.fullmatch(identity):
        return Hub(identity)
    raise TraceError(f"unknown library {shown(source)}: expected a folder, or a data set of the hub as owner/name")


class Folder:
    """A library on disk; without an index it holds its `NAME.zarr` folders."""

    def __init__(self, path: Path, where: str, licence: str = "") -> None:
        self.where = where
        self._path, self._licence = path, licence

    def index(self) -> Index:
        """Return the index. Raises TraceError if it, or a trace of a folder without one, is damaged."""
        file = self._path / INDEX
        if file.exists():
            return read_index(_read(file), self.where)
        found = sorted(self._path.glob("*.zarr"))
        try:
            return Index(traces=tuple(described(open_trace(path), path.stem, self._licence) for path in found))
        except ValidationError as wrong:
            fix = "rename the folder"
            raise TraceError(f"{self.where}: {first_fault(wrong)}; {fix}") from None

    def folder(self, entry: Entry) -> Path:
        """Return the folder of the trace."""
        return self._path / folder_of(entry.name)


class Hub:
    """A data set of the Hugging Face hub; downloads stay in the cache of huggingface_hub."""

    def __init__(self, identity: str) -> None:
        """Raise TraceError if huggingface_hub is not installed."""
        if not find_spec("huggingface_hub"):
            fix = "pip install huggingface_hub, or download the data set and pass its folder"
            raise TraceError(f"{identity} is not a folder, and a data set from the hub requires huggingface_hub: {fix}")
        self.where = f"{HUB}{identity}"
        self._identity = identity

    def index(self) -> Index:
        """Return the index. Raises TraceError."""
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

        disable_progress_bars()
        try:
            return read_index(_read(self._fetched(INDEX, 0) / INDEX), self.where)
        finally:
            enable_progress_bars()

    def folder(self, entry: Entry) -> Path:
        """Download the files of the trace concurrently. Raises TraceError."""
        return self._fetched(f"{folder_of(entry.name)}/*", entry.bytes) / folder_of(entry.name)

    def _fetched(self, pattern: str, size: int) -> Path:
        """Fetch some files, of `size` bytes in all."""
        seconds = ANSWER_S + size / SLOWEST
        return snapshot(self._identity, "data set", seconds, repo_type="dataset", allow_patterns=[pattern])


def _read(file: Path) -> bytes:
    try:
        return content(file, MOST_BYTES)
    except OSError as wrong:
        raise TraceError(f"{file}: {wrong.strerror}: expected the index of a trace library") from None


# -- Publish

CARD = "README.md"
PROMPT_ARRAY = "token_ids"
PROMPT_ARRAYS = (PROMPT_ARRAY, f"{DRAFT}{PROMPT_ARRAY}")


def publish(trace: Trace, out: Path, name: str, licence: str, source: str = "") -> Entry:
    """Write `NAME.zarr`, `traces.json` and `README.md` into `out`, a new or existing library.

    Token ids are left out, because they spell the prompts; a hash of them is kept. Calling again completes an
    interrupted publication and does not change a complete one. Raises TraceError for a licence that SPDX does not
    list, for an invalid or used name, and if the library cannot be written.
    """
    licence = checked_licence(licence)
    path = out / folder_of(_named(name))
    with _alone(out):
        index = read_index(_read(out / INDEX), str(out)) if (out / INDEX).exists() else Index()
        listed = next((each for each in index.traces if each.name == name), None)
        taken = TraceError(f"{out} has a trace {name} already; choose another --name")
        if listed and (listed.licence != licence or not path.exists()):
            raise taken
        without_tokens = (_without_tokens(trace.request(at)) for at in range(trace.requests))
        made = _kept(path, trace)
        made = made or write_trace(path, trace.header, without_tokens, trace.router_bias, resumable=False)
        entry = described(made, name, licence, source, prompts_sha256(trace))
        entry = entry.model_copy(update={"files": tuple(_files(made))})
        if listed not in (None, entry):
            raise taken
        if listed is None:
            index = index.model_copy(update={"traces": (*index.traces, entry)})
            write_whole(out / INDEX, (index.model_dump_json(indent=1) + "\n").encode())
        write_whole(out / CARD, card(index).encode())
    return entry


def _without_tokens(request: Request) -> Request:
    rejected = {name: rows for name, rows in request.rejected.items() if name != PROMPT_ARRAY}
    return replace(request, token_ids=None, rejected=rejected)


def _kept(path: Path, trace: Trace) -> Trace | None:
    """Return the trace at `path` if an earlier call wrote the same rows, None if there is none. Raises TraceError."""
    if not (path.exists() or path.is_symlink()):
        return None
    refuse_busy(partial_of(path))  # and remove the lock file of a writer that was killed as it ended
    try:
        made = open_trace(path)
        verify(made)
    except TraceError as damaged:
        raise TraceError(f"{path} exists and cannot be read ({damaged}); remove it, or choose another --name") from None
    rows = {array: digest for array, digest in trace.array_digests.items() if array not in PROMPT_ARRAYS}
    if made.header != trace.header or dict(made.array_digests) != rows:
        raise TraceError(f"the library has a trace {path.stem} already, with other rows; choose another --name")
    return made


def checked_licence(licence: str) -> str:
    """Return the licence in SPDX's spelling. Raises TraceError."""
    try:
        return canonicalize_license_expression(licence)
    except InvalidLicenseExpression:
        fix = "such as Apache-2.0, CC-BY-4.0, or another identifier of https://spdx.org/licenses"
        raise TraceError(f"invalid --licence {licence[:60]!r}: expected an SPDX licence expression; {fix}") from None


def prompts_sha256(trace: Trace) -> str:
    """Hash every request's prompt: its length as int64, then its token ids as int32; empty without token ids."""
    if "token_ids" not in trace.arrays:
        return ""
    hasher = hashlib.sha256()
    for first, length in zip(trace.request_offsets[:-1].tolist(), trace.prompt_lengths.tolist(), strict=True):
        hasher.update(np.array([length], "<i8").tobytes())
        hasher.update(np.ascontiguousarray(trace.read("token_ids", first, first + length), "<i4").tobytes())
    return hasher.hexdigest()


def _named(name: str) -> str:
    try:
        return checked_name(name)
    except ValueError as wrong:
        raise TraceError(f"--name: {wrong}") from None


def _files(made: Trace) -> Iterator[File]:
    assert made.path is not None
    for name in files_of(made):
        file = made.path / name
        yield File(path=f"{made.path.name}/{name}", bytes=file.stat().st_size, sha256=sha256_of(file))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock the library. Raises TraceError if another process writes to it, or if it cannot be written."""
    try:
        refuse_inside_trace(out / INDEX)
        with leaving_no_folders(out):
            out.mkdir(parents=True, exist_ok=True)
            lock = Lock(out / INDEX)
            try:
                yield
            finally:
                lock.release()
    except OSError as refused:
        raise TraceError(f"cannot write {out}: {refused.strerror or refused}; choose another --out") from None


# -- Fetch

BLOCK = 1 << 20
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def fetch(library: Library, name: str, out: Path) -> Trace:
    """Copy a trace to `out`, completely or not at all, and open it.

    Raises TraceError for an unknown name, an `out` that exists, and files that differ from the published ones.
    """
    if out.exists() or out.suffix != ".zarr":
        raise TraceError(f"{out} {'exists' if out.exists() else 'does not end in .zarr'}; choose another --out")
    try:
        refuse_inside_trace(out)
    except OSError as refused:
        raise TraceError(f"cannot fetch {name} to {out}: {refused.strerror}; choose another --out") from None
    entry = library.index().entry(name, library.where)
    source = library.folder(entry)
    try:
        with whole_folder(out) as scratch:
            _copy(source, entry, scratch)
            trace = open_trace(scratch)
            verify(trace)
            if differs := entry.difference(trace):
                raise TraceError(f"{library.where}: {name}: {differs}; ask the publisher for a corrected library")
    except OSError as refused:
        raise TraceError(f"cannot fetch {name} to {out}: {refused.strerror or refused}") from None
    return open_trace(out)


def _copy(source: Path, entry: Entry, target: Path) -> None:
    if not entry.files:  # of a folder without an index, in which anything may lie
        for name in files_of(open_trace(source)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            file = os.open(source / name, AT_ONCE | NO_LINKS)  # not a link that has replaced it since
            with os.fdopen(file, "rb") as read, (target / name).open("xb") as written:
                shutil.copyfileobj(read, written, BLOCK)
    for published in entry.files:
        inside = PurePosixPath(published.path).relative_to(source.name)
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        _copy_checked(source / inside, published, target / inside)


def _copy_checked(source: Path, file: File, target: Path) -> None:
    if not source.is_file():
        raise TraceError(f"{source} is in the index but missing; download the library again")
    hasher, size = hashlib.sha256(), 0
    with source.open("rb") as read, target.open("xb") as written:
        while block := read.read(BLOCK):
            hasher.update(block)
            size += len(block)
            written.write(block)
    if (size, hasher.hexdigest()) != (file.bytes, file.sha256):
        raise TraceError(f"{source}: {size:,} bytes that differ from the published {file.bytes:,}; download it again")


# -- The card README.md, which a hub shows

PLAIN = re.compile(r"[A-Za-z0-9.+-]+")  #: a licence that YAML reads as a text
TAGS = ("mixture-of-experts", "expert-routing", "moereplay")
COLUMNS = ("name", "model", "licence", "requests", "tokens", "MB", "holds", "source", "digest")


def card(index: Index) -> str:
    """Return the card in Markdown, with the YAML header by which hubs classify data sets."""
    licences = sorted({trace.licence for trace in index.traces})
    licence = licences[0].lower() if len(licences) == 1 and PLAIN.fullmatch(licences[0]) else "other"
    head = ["---", f"license: {licence}", "tags:", *(f"- {tag}" for tag in TAGS), "---"]
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|", *map(_row, index.traces)]
    return "\n".join([*head, "", "# Routing traces of Mixture-of-Experts models", "", USE, "", *rows, "", PROMPTS, ""])


USE = """Which experts each token ran at each layer, in the format of moereplay:

    moereplay traces list THIS_LIBRARY
    moereplay traces get NAME --from THIS_LIBRARY --out NAME.zarr
    moereplay replay NAME.zarr --capacity 25% --eviction lru,least_stale

`traces.json` has the sha256 of every file, and `get` checks them."""
PROMPTS = "Prompts are not published; `prompts_sha256` in `traces.json` is a hash of their token ids."


def _row(entry: Entry) -> str:
    size = f"{entry.bytes / MB:,.1f}"
    cells = (entry.name, entry.model, entry.licence, f"{entry.requests:,}", f"{entry.tokens:,}", size)
    cells += (", ".join(entry.capabilities), entry.source, entry.digest[:12])
    return f"| {' | '.join(map(in_markdown, cells))} |"
