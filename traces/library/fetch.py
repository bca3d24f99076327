"""Take a trace out of a library: its files are copied, each held to its published sha256, and opened."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path, PurePosixPath

from traces.library.index import Entry, File
from traces.library.sources import Library
from traces.schema import Trace, TraceError
from traces.scratch import SUFFIX, scratch_name
from traces.store import open_trace, verify

BLOCK = 1 << 20


def fetch(library: Library, name: str, out: Path) -> Trace:
    """The trace under `out`, which appears whole or not at all.

    Raises TraceError for a name that is not there, an `out` that is, and bytes that are not those published.
    """
    if out.exists() or out.suffix != ".zarr":
        raise TraceError(f"{out} {'exists' if out.exists() else 'does not end in .zarr'}; choose another --out")
    entry = library.index().entry(name, library.where)
    source = library.folder(entry)
    scratch = out.with_name(f".{out.name}.{scratch_name()}{SUFFIX}")
    try:
        _copy(source, entry, scratch)
        trace = open_trace(scratch)
        verify(trace)
        if trace.digest != entry.digest:
            raise TraceError(f"{library.where}: {name} has digest {trace.digest}, published was {entry.digest}")
        scratch.rename(out)
    except OSError as refused:
        raise TraceError(f"cannot fetch {name} to {out}: {refused.strerror or refused}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return open_trace(out)


def _copy(source: Path, entry: Entry, target: Path) -> None:
    target.mkdir(parents=True)
    if not entry.files:  # of a folder without an index
        shutil.copytree(source, target, dirs_exist_ok=True)
    for file in entry.files:
        inside = PurePosixPath(file.path).relative_to(source.name)
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        _copy_checked(source / inside, file, target / inside)


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
