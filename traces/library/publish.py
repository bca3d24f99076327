"""Add a trace to a library: without its prompts, under a licence, with digests, an index and a card."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from traces.documents import content
from traces.library.card import card
from traces.library.index import INDEX, MOST_BYTES, Entry, File, Index, checked_name, described, folder_of, read_index
from traces.lock import Lock
from traces.schema import Request, Trace, TraceError
from traces.scratch import write_whole
from traces.writer import write_trace

CARD = "README.md"


def publish(trace: Trace, out: Path, name: str, licence: str, source: str = "") -> Entry:
    """Write `NAME.zarr`, `traces.json` and `README.md` into `out`, a new library or one that is there.

    Token ids are left out, as they spell the prompts; a hash of them is kept. Raises TraceError for a licence that is
    none of SPDX, a name that is taken or is none, and what cannot be written.
    """
    licence = checked_licence(licence)
    path = out / folder_of(_named(name))
    with _alone(out):
        index = _index(out)
        if name in {each.name for each in index.traces}:
            raise TraceError(f"{out} has a trace {name} already; choose another --name")
        prompts = prompts_sha256(trace)
        made = write_trace(path, trace.header, _without_tokens(trace), trace.router_bias)
        entry = described(made, name, licence, source, prompts)
        entry = entry.model_copy(update={"files": tuple(_files(path))})
        index = index.model_copy(update={"traces": (*index.traces, entry)})
        write_whole(out / INDEX, (index.model_dump_json(indent=1) + "\n").encode())
        write_whole(out / CARD, card(index).encode())
    return entry


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


def _files(path: Path) -> Iterator[File]:
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        yield File(path=file.relative_to(path.parent).as_posix(), bytes=file.stat().st_size, sha256=sha256)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Nobody else adds to the library meanwhile. Raises TraceError if somebody does, or nothing can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out / INDEX)
        try:
            yield
        finally:
            lock.release()
    except OSError as refused:
        raise TraceError(f"cannot write {out}: {refused.strerror or refused}; choose another --out") from None
