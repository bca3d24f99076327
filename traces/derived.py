"""Arrays derived once from a trace and kept as memory-mapped .npy files, keyed by the trace's digest.

They are stored next to the trace in `NAME.derived/`, because a long trace has many gigabytes of them. If
that folder cannot be written, or holds another user's arrays, they go to the user's cache. Machine code indexes by
these arrays, so a file is mapped only if a manifest in a private folder of this user records its sha256; damaged files
are derived again. Hashing reads about 1 GB/s, so a file whose inode, size and times are unchanged is not hashed again.
Arrays of a trace in memory, or of an unfinished recording, are not kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from moereplay.traces.files import is_mine, is_private, private_folder, user_cache
from moereplay.traces.growing import Growing, InFile, InMemory, Rows
from moereplay.traces.schema import Frozen, Trace, canonical

VERSION = 3  #: raised when the meaning of any derived array changes
MOST_NAME = 150  #: characters; file systems allow 255 in all
LOG = logging.getLogger(__name__)

Columns = Mapping[str, Rows]
Fill = Callable[[Mapping[str, Growing]], None]


def derived(trace: Trace, what: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    """Return the arrays named `what`; `fill` computes them block by block if they are not cached.

    All replays of this process share them, memory-mapped where possible. Raises TraceError for damaged rows.
    """
    return shared(trace, what, partial(_derived, trace, what, columns, fill))


def _derived(trace: Trace, what: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    if trace.path is None or not trace.complete:
        return _in_memory(columns, fill)
    name = what.replace(":", "").replace("/", "-")
    if len(name) > MOST_NAME:
        name = hashlib.sha256(name.encode()).hexdigest()
    key = f"{trace.digest[:32]}-v{VERSION}-{name}"
    folders = _folders(trace.path.absolute(), key)
    found = _found(folders, key)
    return _made(folders, key, columns, fill) if found is None else found


def _folders(path: Path, key: str) -> list[Path]:
    """Return the folders that may hold the arrays of a key, in order of preference."""
    beside, cache = path.with_name(path.name + ".derived") / key, user_cache()
    return [beside] if cache is None else [beside, cache / "derived" / key]


def _found(folders: list[Path], key: str) -> dict[str, np.ndarray] | None:
    manifest = manifest_of(key)
    if manifest is None:
        return None
    for folder in folders:
        arrays = mapped(folder, manifest)
        if arrays is not None:
            return arrays
        if os.path.lexists(folder) and not _is_others(folder):
            LOG.warning("%s is damaged or was modified; deriving it again", folder)
    return None


def _made(folders: list[Path], key: str, columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    for folder in folders:
        # a folder without a manifest is of another machine, which may have mapped it: leave it
        if folder is folders[0] and os.path.lexists(folder) and (manifest_of(key) is None or _is_others(folder)):
            continue
        try:
            manifest = _written(folder, key, columns, fill)
        except OSError:
            continue
        arrays = mapped(folder, manifest)
        if arrays is not None:
            return arrays
    return _in_memory(columns, fill)


def _is_others(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return not is_mine(folder.lstat())
    return False


def _in_memory(columns: Columns, fill: Fill) -> dict[str, np.ndarray]:
    arrays = {name: InMemory(rows) for name, rows in columns.items()}
    fill(arrays)
    return {name: read_only(held.array) for name, held in arrays.items()}


def _written(folder: Path, key: str, columns: Columns, fill: Fill) -> Manifest:
    """Fill a scratch folder, keep its manifest, then rename it to `folder`. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=key, dir=folder.parent))
    try:
        if not is_private(scratch):
            raise PermissionError(f"other users can write to folders in {folder.parent}")
        with ExitStack() as opened:
            files = {
                name: opened.enter_context(InFile(scratch / f"{name}.npy", rows)) for name, rows in columns.items()
            }
            fill(files)
            for file in files.values():
                file.finish()
        manifest = describe(key, folder, files)
        keep(manifest)
        _replace(folder, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _replace(folder: Path, scratch: Path) -> None:
    """Rename `scratch` to `folder`, and remove a folder or file of that name."""
    if os.path.lexists(folder):
        aside = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            folder.rename(aside / "old")
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    scratch.rename(folder)


# -- Manifests

State = tuple[int, int, int, int]  #: inode, size, time of the last change of content, of any change
SETTLED_NS = 20_000_000  #: two ticks of the coarsest clock of a file system
#: Flags of `os.open` for a file that may be anything: a pipe does not block, a link is refused.
SAFELY = sum(getattr(os, flag, 0) for flag in ("O_BINARY", "O_NONBLOCK", "O_NOFOLLOW"))


class Described(Frozen):
    """A file of one array as the manifest records it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  #: of the first value, in bytes
    sha256: str  #: of the whole file

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.offset + np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


class Manifest(Frozen):
    """The arrays of one key."""

    key: str
    arrays: dict[str, Described]
    seen: dict[str, dict[str, State]] = Field(default_factory=dict)  #: folder -> files as last compared with sha256
    digest: str = ""

    def sealed(self) -> Manifest:
        """Return a copy with the digest over all other fields."""
        return self.model_copy(update={"digest": hashlib.sha256(self._content()).hexdigest()})

    def is_whole(self) -> bool:
        """Return True if no field was changed since it was sealed."""
        return self.digest == hashlib.sha256(self._content()).hexdigest()

    def _content(self) -> bytes:
        return canonical(self.model_dump(mode="json", exclude={"digest"}))


#: Manifests of this process, for users who have no place to keep them.
KNOWN: dict[str, Manifest] = {}


def manifest_of(key: str) -> Manifest | None:
    """Return the manifest of a key; None if it is missing or damaged."""
    try:
        found = Manifest.model_validate_json((private_folder("derived") / f"{key}.json").read_bytes())
    except (OSError, ValidationError):
        return KNOWN.get(key)
    return found if found.key == key and found.is_whole() else None


def describe(key: str, folder: Path, files: Mapping[str, InFile]) -> Manifest:
    """Return the manifest of newly written files that will be moved to `folder`. Raises OSError."""
    arrays, states = {}, {}
    for name, written in files.items():
        with written.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            states[name] = _state(file)
        arrays[name] = Described(dtype=written.of.dtype, shape=written.shape, offset=written.offset, sha256=digest)
    return Manifest(key=key, arrays=arrays, seen={str(folder): states} if _are_settled(states) else {})


def keep(manifest: Manifest) -> None:
    """Write a manifest atomically, and keep it in this process in case it cannot be written."""
    KNOWN[manifest.key] = manifest
    with suppress(OSError):
        folder = private_folder("derived")
        handle, temporary = tempfile.mkstemp(prefix=f".{manifest.key}", dir=folder)
        with os.fdopen(handle, "w") as file:
            file.write(manifest.sealed().model_dump_json())
        Path(temporary).replace(folder / f"{manifest.key}.json")


def mapped(folder: Path, manifest: Manifest) -> dict[str, np.ndarray] | None:
    """Map the arrays in `folder`; None if one is missing, another user's, or differs from the manifest."""
    seen, states, looks, arrays = manifest.seen.get(str(folder), {}), {}, {}, {}
    try:
        if not is_private(folder):
            return None
        looks[str(folder)] = look(folder.lstat())
        for name, described in manifest.arrays.items():
            file_name = f"{folder}/{name}.npy"
            with BufferedReader(FileIO(os.open(file_name, os.O_RDONLY | SAFELY))) as file:
                states[name], looks[file_name] = _state(file), look(os.fstat(file.fileno()))
                if not _is_whole(file, described, seen.get(name)):
                    return None
                arrays[name] = np.memmap(file, described.dtype, "r", described.offset, described.shape)
    except (OSError, ValueError):  # gone, or truncated, since it was looked at
        return None
    if states != seen and _are_settled(states):
        keep(manifest.model_copy(update={"seen": manifest.seen | {str(folder): states}}))
    stands_on(Mapped(looks, _are_settled(states)))
    return arrays


def _is_whole(file: BufferedReader[Any], described: Described, seen: State | None) -> bool:
    """Return True if an open file is the recorded one; the size is compared first, so that no huge file is hashed."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or not is_mine(found) or found.st_size != described.bytes:
        return False
    return _state(file) == seen or hashlib.file_digest(file, "sha256").hexdigest() == described.sha256


def _are_settled(states: Mapping[str, State]) -> bool:
    """Return True if a later write must change the files' times, which stay equal within a tick of the clock."""
    now = time.time_ns()
    return all(now - max(state[2:]) > SETTLED_NS for state in states.values())


def _state(file: BufferedReader[Any]) -> State:
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
