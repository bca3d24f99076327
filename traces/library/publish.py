"""Add a trace to a library: without its prompts, under a licence, with digests, an index and a card."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from moereplay.traces.documents import content
from moereplay.traces.files import refuse_inside_trace, write_whole
from moereplay.traces.library.card import card
from moereplay.traces.library.index import (
    INDEX,
    MOST_BYTES,
    Entry,
    File,
    Index,
    checked_name,
    described,
    folder_of,
    read_index,
)
from moereplay.traces.lock import Lock
from moereplay.traces.schema import Request, Trace, TraceError
from moereplay.traces.store import files_of, open_trace, verify
from moereplay.traces.writer import write_trace

CARD = "README.md"
PROMPT_ARRAY = "token_ids"


def publish(trace: Trace, out: Path, name: str, licence: str, source: str = "") -> Entry:
    """Write `NAME.zarr`, `traces.json` and `README.md` into `out`, a new library or one that is there.

    Token ids are left out, as they spell the prompts; a hash of them is kept. The same call again completes a
    publication that was interrupted, and changes nothing of a complete one. Raises TraceError for a licence that is
    none of SPDX, a name that is taken or invalid, and what cannot be written.
    """
    licence = checked_licence(licence)
    path = out / folder_of(_named(name))
    with _alone(out):
        index = _index(out)
        listed = next((each for each in index.traces if each.name == name), None)
        taken = TraceError(f"{out} has a trace {name} already; choose another --name")
        if listed and (listed.licence != licence or not path.exists()):
            raise taken
        made = _kept(path, trace) or _written(path, trace)
        entry = described(made, name, licence, source, prompts_sha256(trace))
        entry = entry.model_copy(update={"files": tuple(_files(made))})
        if listed not in (None, entry):
            raise taken
        if listed is None:
            index = index.model_copy(update={"traces": (*index.traces, entry)})
            write_whole(out / INDEX, (index.model_dump_json(indent=1) + "\n").encode())
        write_whole(out / CARD, card(index).encode())
    return entry


def _kept(path: Path, trace: Trace) -> Trace | None:
    """The trace of that path, if an earlier call wrote it of the same rows. Raises TraceError if it is another one."""
    if not (path.exists() or path.is_symlink()):
        return None
    try:
        made = open_trace(path)
        verify(made)
    except TraceError as damaged:
        raise TraceError(f"{path} exists and cannot be read ({damaged}); remove it, or choose another --name") from None
    rows = {array: digest for array, digest in trace.array_digests.items() if array != PROMPT_ARRAY}
    if made.header != trace.header or dict(made.array_digests) != rows:
        raise TraceError(f"the library has a trace {path.stem} already, of other rows; choose another --name")
    return made


def _written(path: Path, trace: Trace) -> Trace:
    """Write the trace without its token ids, whole or not at all. Raises TraceError."""
    return write_trace(path, trace.header, _without_tokens(trace), trace.router_bias, resumable=False)


def checked_licence(licence: str) -> str:
    """As SPDX spells it. Raises TraceError."""
    try:
        return canonicalize_license_expression(licence)
    except InvalidLicenseExpression:
        fix = "write Apache-2.0, CC-BY-4.0, or another identifier of https://spdx.org/licenses"
        raise TraceError(f"--licence {licence[:60]!r} is no SPDX licence expression; {fix}") from None


def prompts_sha256(trace: Trace) -> str:
    """Of every request's prompt: its length as int64, then its token ids as int32; empty without token ids."""
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
        raise TraceError(f"--name {wrong}") from None


def _without_tokens(trace: Trace) -> Iterator[Request]:
    return (replace(trace.request(at), token_ids=None) for at in range(trace.requests))


def _index(out: Path) -> Index:
    try:
        return read_index(content(out / INDEX, MOST_BYTES), str(out))
    except FileNotFoundError:
        return Index()
    except OSError as wrong:
        raise TraceError(f"{out / INDEX}: {wrong.strerror}; expected the index of a library of traces") from None


def _files(made: Trace) -> Iterator[File]:
    assert made.path is not None
    for name in files_of(made):
        file = made.path / name
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        yield File(path=f"{made.path.name}/{name}", bytes=file.stat().st_size, sha256=sha256)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Nobody else adds to the library meanwhile. Raises TraceError if somebody does, or nothing can be written."""
    try:
        refuse_inside_trace(out / INDEX)
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out / INDEX)
        try:
            yield
        finally:
            lock.release()
    except OSError as refused:
        raise TraceError(f"cannot write {out}: {refused.strerror or refused}; choose another --out") from None
