"""Libraries of traces: their index `traces.json` and their location: bundled, a folder, or a data set on the hub."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from pydantic import Field, ValidationError, field_validator, model_validator

from moereplay.traces.documents import DocumentError, Frozen, Name, Text, content, first_fault, from_json
from moereplay.traces.files import SAMPLE, bundled
from moereplay.traces.network import ANSWER_S, IDENTITY, snapshot
from moereplay.traces.schema import Trace, TraceError, shown
from moereplay.traces.store import files_of, open_trace
from moereplay.traces.texts import hint

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
        found = {each.name: each for each in self.traces}
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
