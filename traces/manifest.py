"""The manifest of derived arrays: shape, offset and sha256 of each, kept where only this user can write.

The arrays may lie beside a trace, in a folder that others filled, and machine code indexes by them. So a file is mapped
only if it is, to the byte, one that this user's own replays made. Hashing reads about 1 GB/s; a file whose inode, size
and times are still those of the last comparison is not hashed again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from moereplay.traces.files import is_mine, is_private, private_folder
from moereplay.traces.growing import InFile
from moereplay.traces.schema import Frozen, canonical
from moereplay.traces.shared import Mapped, look, stands_on

State = tuple[int, int, int, int]  # inode, bytes, and when content and anything else about the file last changed
SETTLED_NS = 20_000_000  #: two of the longest ticks
#: How a file that may be anything is opened: a pipe at once, a link never.
SAFELY = sum(getattr(os, flag, 0) for flag in ("O_BINARY", "O_NONBLOCK", "O_NOFOLLOW"))


class Described(Frozen):
    """An array's file as the manifest records it, to be compared with what is on disk."""

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
        """With the digest of everything else."""
        return self.model_copy(update={"digest": hashlib.sha256(self._content()).hexdigest()})

    def is_whole(self) -> bool:
        """Whether it is as it was sealed."""
        return self.digest == hashlib.sha256(self._content()).hexdigest()

    def _content(self) -> bytes:
        return canonical(self.model_dump(mode="json", exclude={"digest"}))


#: Manifests of this process, for users who have no place to keep them.
KNOWN: dict[str, Manifest] = {}


def manifest_of(key: str) -> Manifest | None:
    """The manifest of a key; None where there is none, or a damaged one."""
    try:
        found = Manifest.model_validate_json((private_folder("derived") / f"{key}.json").read_bytes())
    except (OSError, ValidationError):
        return KNOWN.get(key)
    return found if found.key == key and found.is_whole() else None


def describe(key: str, folder: Path, files: Mapping[str, InFile]) -> Manifest:
    """The manifest of files just written, which will lie in `folder`. Raises OSError."""
    arrays, states = {}, {}
    for name, written in files.items():
        with written.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            states[name] = _state(file)
        arrays[name] = Described(dtype=written.of.dtype, shape=written.shape, offset=written.offset, sha256=digest)
    return Manifest(key=key, arrays=arrays, seen={str(folder): states} if _are_settled(states) else {})


def keep(manifest: Manifest) -> None:
    """Write a manifest, whole or not at all; without a place for it, this process remembers it."""
    KNOWN[manifest.key] = manifest
    with suppress(OSError):
        folder = private_folder("derived")
        handle, temporary = tempfile.mkstemp(prefix=f".{manifest.key}", dir=folder)
        with os.fdopen(handle, "w") as file:
            file.write(manifest.sealed().model_dump_json())
        Path(temporary).replace(folder / f"{manifest.key}.json")


def mapped(folder: Path, manifest: Manifest) -> dict[str, np.ndarray] | None:
    """The arrays in `folder`, memory-mapped; None if any is missing, another user's, or differs from the manifest."""
    seen, states, looks, arrays = manifest.seen.get(str(folder), {}), {}, {}, {}
    try:
        if not is_private(folder):
            return None
        looks[str(folder)] = look(folder.lstat())
        for name, described in manifest.arrays.items():
            file_name = f"{folder}/{name}.npy"
            with _opened(file_name) as file:
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


def _opened(path: str) -> BufferedReader:
    return BufferedReader(FileIO(os.open(path, os.O_RDONLY | SAFELY)))


def _is_whole(file: BufferedReader, described: Described, seen: State | None) -> bool:
    """Whether an open file has the bytes that the manifest says; sizes first, so that no huge file is read."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or not is_mine(found) or found.st_size != described.bytes:
        return False
    return _state(file) == seen or hashlib.file_digest(file, "sha256").hexdigest() == described.sha256


def _are_settled(states: Mapping[str, State]) -> bool:
    """Whether a later write would change the file's times, which stay equal within a tick of the clock."""
    now = time.time_ns()
    return all(now - max(state[2:]) > SETTLED_NS for state in states.values())


def _state(file: BufferedReader) -> State:
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
