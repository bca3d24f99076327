"""Take a trace out of a library: its files are copied, each held to its published sha256, and opened."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path, PurePosixPath

from moereplay.traces.documents import AT_ONCE
from moereplay.traces.files import SUFFIX, refuse_inside_trace, scratch_name
from moereplay.traces.library.index import Entry, File
from moereplay.traces.library.sources import Library
from moereplay.traces.schema import Trace, TraceError
from moereplay.traces.store import files_of, open_trace, verify

BLOCK = 1 << 20
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def fetch(library: Library, name: str, out: Path) -> Trace:
    """The trace under `out`, which appears whole or not at all.

    Raises TraceError for a name that is not there, an `out` that is, and bytes that are not those published.
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
        _copy(source, entry, scratch)
        trace = open_trace(scratch)
        verify(trace)
        if differs := entry.difference(trace):
            raise TraceError(f"{library.where}: {name}: {differs}; ask the publisher for a corrected library")
        scratch.rename(out)
    except OSError as refused:
        raise TraceError(f"cannot fetch {name} to {out}: {refused.strerror or refused}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
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
    """Copy a file that `files_of` has named. Raises OSError for a link that has taken its place since."""
    with os.fdopen(os.open(source, AT_ONCE | NO_LINKS), "rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, BLOCK)


def _copy_checked(source: Path, file: File, target: Path) -> None:
    if not source.is_file():
        raise TraceError(f"{source}: the index names it, and it is not there; fetch the library again")
    hasher, size = hashlib.sha256(), 0
    with source.open("rb") as read, target.open("xb") as written:
        while block := read.read(BLOCK):
            hasher.update(block)
            size += len(block)
            written.write(block)
    if (size, hasher.hexdigest()) != (file.bytes, file.sha256):
        raise TraceError(f"{source}: {size:,} bytes that are not those published ({file.bytes:,}); fetch it again")
