"""Arrays derived once from a trace and kept as memory-mapped .npy files, keyed by the trace's digest.

Machine code indexes by these arrays, so they lie in a private folder of this user (`place`), and a file is mapped only
if its sha256 is that of the folder's manifest; damaged files are derived again. Hashing reads about 1 GB/s, so a file
whose inode, size and times are unchanged is not hashed again. Arrays of a trace in memory, or of an unfinished
recording, are not kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moereplay.traces.files import (
    claimed,
    forget_unused,
    private_folder,
    remove,
    scratch_beside,
    sha256_of,
    whole_folder,
)
from moereplay.traces.growing import Growing, InFile, InMemory, Rows
from moereplay.traces.schema import Frozen, Trace, TraceError

VERSION = 4  #: raised when the meaning of any derived array, or the form of a manifest, changes
MOST_NAME = 100  #: characters; file systems allow 255 in all
PLACE = "MOEREPLAY_DERIVED"  #: environment variable: the folder that holds this user's private one
KEPT_SECONDS = 30 * 86_400.0  #: without use
MANIFEST = "manifest.json"
LOG = logging.getLogger(__name__)

Columns = Mapping[str, Rows]
Fill = Callable[[Mapping[str, Growing]], None]


def derived(trace: Trace, what: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    """Return the arrays named `what`; `fill` computes them block by block if they are not cached.

    All replays of this process share them, memory-mapped where possible. Raises TraceError for damaged rows.
    """
    return shared(trace, what, partial(_derived, trace, what, columns, fill))


def place() -> Path:
    """Return the private folder of all derived arrays. Raises OSError, and TraceError for a folder that was asked for.

    It is in the folder that the environment variable names, else in the user's cache, else in a temporary folder.
    """
    chosen = os.environ.get(PLACE)
    if not chosen:
        return private_folder("derived")
    if claimed(folder := Path(chosen).absolute() / "moereplay" / "derived"):
        return folder
    raise TraceError(f"invalid {PLACE} '{chosen}': expected a folder in which you can make one of your own")


def _derived(trace: Trace, what: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    arrays = None
    if trace.path is not None and trace.complete:
        name = what.replace(":", "").replace("/", "-")
        if len(name) > MOST_NAME:
            name = hashlib.sha256(name.encode()).hexdigest()
        with suppress(OSError):  # nothing can be written there, or the disk is full
            folder = place() / f"{trace.digest[:32]}-v{VERSION}-{name}"
            arrays = mapped(folder, columns)
            if arrays is None:
                if os.path.lexists(folder):
                    LOG.warning("%s is damaged or was modified; deriving it again", folder)
                _write(folder, columns, fill)
                arrays = mapped(folder, columns)
    if arrays is None:
        growing = {name: InMemory(rows) for name, rows in columns.items()}
        fill(growing)
        arrays = {name: read_only(column.array) for name, column in growing.items()}
    return arrays


def _write(folder: Path, columns: Columns, fill: Fill) -> None:
    """Fill a scratch folder with the arrays and their manifest, then rename it to `folder`. Raises OSError."""
    forget_unused(folder.parent, "*", KEPT_SECONDS)
    with whole_folder(folder, synced=False) as scratch, ExitStack() as opened:
        files = {name: opened.enter_context(InFile(scratch / f"{name}.npy", rows)) for name, rows in columns.items()}
        fill(files)
        arrays = {}
        for name, file in files.items():
            file.finish()
            arrays[name] = Described(bytes=file.path.stat().st_size, sha256=sha256_of(file.path))
        (scratch / MANIFEST).write_text(Manifest(arrays=arrays).model_dump_json())
        remove(folder)


# -- Manifests

State = tuple[int, int, int, int]  #: inode, size, time of the last change of content, of any change
SETTLED_NS = 20_000_000  #: two ticks of the coarsest clock of a file system
#: Flags of `os.open` for a file that may be anything: a pipe does not block, a link is refused.
SAFELY = sum(getattr(os, flag, 0) for flag in ("O_BINARY", "O_NONBLOCK", "O_NOFOLLOW"))


class Described(Frozen):
    """A file of one array as the manifest records it."""

    bytes: int  #: compared first, so that no huge file is hashed
    sha256: str
    seen: State | None = None  #: as last compared with sha256


class Manifest(Frozen):
    """The arrays of one folder."""

    arrays: dict[str, Described]


def mapped(folder: Path, columns: Columns) -> dict[str, np.ndarray] | None:
    """Map the arrays in `folder`; None if one is missing or differs from the manifest."""
    seen, looks, arrays = {}, {}, {}
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        for name in columns:
            path, described = folder / f"{name}.npy", manifest.arrays[name]
            with BufferedReader(FileIO(os.open(path, os.O_RDONLY | SAFELY))) as file:
                found = os.fstat(file.fileno())
                state = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
                if not stat.S_ISREG(found.st_mode) or found.st_size != described.bytes:
                    return None
                if state != described.seen and hashlib.file_digest(file, "sha256").hexdigest() != described.sha256:
                    return None
                file.seek(0)
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                arrays[name] = np.memmap(file, dtype, "r", file.tell(), shape)
            seen[name], looks[str(path)] = described.model_copy(update={"seen": state}), look(found)
    except (OSError, ValueError, KeyError):  # gone, or truncated, since it was looked at
        return None
    # within a tick of the clock a later write would leave the files' times as they are
    settled = all(time.time_ns() - max(changed, any_change) > SETTLED_NS for *_, changed, any_change in looks.values())
    with suppress(OSError):
        os.utime(folder)  # it is in use
        if settled and seen != manifest.arrays:
            scratch = scratch_beside(folder / MANIFEST)
            scratch.write_text(Manifest(arrays=seen).model_dump_json())
            scratch.replace(folder / MANIFEST)
    stands_on(Mapped(looks, settled))
    return arrays


# -- In-process cache of arrays that replays of one trace share: making them takes longer than a short replay

MOST = 32  #: entries of all stored traces together, and of each trace in memory; a replay uses ten
SHARING = RLock()  #: replays in several threads need the same arrays: one thread makes them

T = TypeVar("T")
Look = tuple[int, ...]


class Mapped(NamedTuple):
    """Files that arrays are mapped from, with their state at that time."""

    looks: Mapping[str, Look]
    settled: bool  #: whether a later change would show in their times


class Entry(NamedTuple):
    """A shared value and the files it depends on."""

    value: Any
    looks: Mapping[str, Look]


_of_stored: dict[Hashable, Entry] = {}
_making: list[list[Mapped]] = []  #: dependencies of the values being made, the innermost last


def shared(trace: Trace, what: Hashable, make: Callable[[], T]) -> T:
    """Return the value named `what`; call `make` if there is none, or if its files have changed.

    Values of a stored trace are keyed by path and digest. Those of another trace live as long as the trace object.
    """
    stored = trace.path is not None and trace.complete
    entries, key = (_of_stored, (str(trace.path), trace.digest, what)) if stored else (trace.shared, what)
    with SHARING:
        entry = entries.get(key)
        if entry is None or not _is_current(entry):
            entry = _kept(entries, key, make)
        else:
            entries[key] = entries.pop(key)  # now the most recently used
            stands_on(Mapped(entry.looks, settled=True))
        return entry.value


def stands_on(mapped: Mapped) -> None:
    """Declare, while a value is computed, that it depends on these files."""
    if _making:
        _making[-1].append(mapped)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view, because other replays read the same bytes."""
    view = array.view()
    view.flags.writeable = False
    return view


def look(found: os.stat_result) -> Look:
    """Return what changes when a file is written to, replaced, or made accessible to others."""
    return found.st_mode, found.st_uid, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _kept(entries: dict[Hashable, Entry], key: Hashable, make: Callable[[], Any]) -> Entry:
    """Make a value, and keep it if a later change of its files can be noticed."""
    _making.append([])
    try:
        value = make()
    finally:
        mapped = _making.pop()
    files = Mapped({path: then for each in mapped for path, then in each.looks.items()}, all(m.settled for m in mapped))
    stands_on(files)
    entry = Entry(value, files.looks)
    entries.pop(key, None)
    if files.settled:
        entries[key] = entry
    while len(entries) > MOST:
        del entries[next(iter(entries))]
    return entry


def _is_current(entry: Entry) -> bool:
    try:
        return all(look(os.lstat(path)) == then for path, then in entry.looks.items())
    except OSError:
        return False
