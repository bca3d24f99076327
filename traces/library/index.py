"""The index of a library, `traces.json`: what each trace is, under which licence, and the sha256 of its files."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from moereplay.traces.documents import DocumentError, from_json
from moereplay.traces.frozen import Frozen, Name, Text, first_fault
from moereplay.traces.schema import Trace, TraceError, shown
from moereplay.traces.store import files_of
from moereplay.traces.texts import hint

INDEX = "traces.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_BYTES = 1 << 26  #: of an index
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
    licence: Name  #: an SPDX expression; empty where nobody said
    requests: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=0)  #: of all files
    capabilities: tuple[Name, ...] = Field(max_length=MOST_CAPABILITIES)
    digest: str = Field(pattern=SHA256)
    source: Text = ""  #: where the routing comes from, in words
    #: Of the token ids of all prompts, which are not published.
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
                raise ValueError(f"{file.path!r} is no file of {folder_of(self.name)}")
        if self.files and sum(file.bytes for file in self.files) != self.bytes:
            raise ValueError(f"bytes is {self.bytes:,}, but its files have {sum(file.bytes for file in self.files):,}")
        return self

    def difference(self, trace: Trace) -> str:
        """Return the first thing that this entry says and the trace does not, in words; empty if there is none."""
        found = described(trace, self.name)
        for name in ("digest", "model", "requests", "tokens", "capabilities"):
            stated, actual = getattr(self, name), getattr(found, name)
            if stated != actual:
                return f"{name} is {shown(stated)} in the index, {shown(actual)} in the trace"
        return ""


class Index(Frozen):
    """All of a library."""

    format: Literal["moereplay-traces"] = "moereplay-traces"
    version: Literal[1] = 1
    traces: tuple[Entry, ...] = ()

    def entry(self, name: str, where: str) -> Entry:
        """The trace of that name. Raises TraceError naming the nearest."""
        found = {each.name: each for each in self.traces}
        if name not in found:
            raise TraceError(f"{where} has no trace {name!r}: {hint(name, tuple(found))}")
        return found[name]


def checked_name(name: str) -> str:
    """The name itself. Raises ValueError for what is no name of a file on every system."""
    if not NAME.fullmatch(name) or name.endswith((".", ".zarr")):
        raise ValueError(f"{name!r} is no name of a trace; use letters, digits, dots, - and _, without .zarr")
    return name


def folder_of(name: str) -> str:
    """Of a trace, in its library."""
    return f"{name}.zarr"


def read_index(text: bytes, where: str) -> Index:
    """Raises TraceError saying what is wrong with it."""
    try:
        return Index.model_validate(from_json(text))
    except DocumentError as broken:
        raise TraceError(f"{where}: {INDEX} cannot be read: {broken}") from None
    except ValidationError as wrong:
        raise TraceError(f"{where}: {INDEX}: {first_fault(wrong)}") from None


def described(trace: Trace, name: str, licence: str = "", source: str = "", prompts_sha256: str = "") -> Entry:
    """The entry of an opened trace, without its files."""
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
