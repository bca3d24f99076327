"""Publish a trace in a library, and fetch one from it; every file is checked against its published sha256."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from moereplay.traces.documents import AT_ONCE, content
from moereplay.traces.files import SUFFIX, leaving_no_folders, refuse_inside_trace, scratch_name, write_whole
from moereplay.traces.library.index import (
    INDEX,
    MOST_BYTES,
    Entry,
    File,
    Index,
    Library,
    checked_name,
    described,
    folder_of,
    read_index,
)
from moereplay.traces.lock import Lock
from moereplay.traces.schema import Request, Trace, TraceError
from moereplay.traces.store import files_of, open_trace, verify
from moereplay.traces.texts import in_markdown
from moereplay.traces.units import MB
from moereplay.traces.values import DRAFT
from moereplay.traces.writer import write_trace

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
        index = _index(out)
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


def _index(out: Path) -> Index:
    try:
        return read_index(content(out / INDEX, MOST_BYTES), str(out))
    except FileNotFoundError:
        return Index()
    except OSError as wrong:
        raise TraceError(f"{out / INDEX}: {wrong.strerror}: expected the index of a trace library") from None


def _files(made: Trace) -> Iterator[File]:
    assert made.path is not None
    for name in files_of(made):
        file = made.path / name
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        yield File(path=f"{made.path.name}/{name}", bytes=file.stat().st_size, sha256=sha256)


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
    scratch = out.with_name(f".{out.name}.{scratch_name()}{SUFFIX}")
    try:
        with leaving_no_folders(out.absolute().parent):
            try:
                _copy(source, entry, scratch)
                trace = open_trace(scratch)
                verify(trace)
                if differs := entry.difference(trace):
                    raise TraceError(f"{library.where}: {name}: {differs}; ask the publisher for a corrected library")
                scratch.rename(out)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as refused:
        raise TraceError(f"cannot fetch {name} to {out}: {refused.strerror or refused}") from None
    return open_trace(out)


def _copy(source: Path, entry: Entry, target: Path) -> None:
    target.mkdir(parents=True)
    if not entry.files:  # of a folder without an index, in which anything may lie
        for name in files_of(open_trace(source)):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _copy_file(source / name, target / name)
    for file in entry.files:
        inside = PurePosixPath(file.path).relative_to(source.name)
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        _copy_checked(source / inside, file, target / inside)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file that `files_of` returned. Raises OSError for a link that has replaced it since."""
    with os.fdopen(os.open(source, AT_ONCE | NO_LINKS), "rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, BLOCK)


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
    licences = sorted({each.licence for each in index.traces})
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
