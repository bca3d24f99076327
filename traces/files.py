"""Files and folders that appear whole or not at all: written under a hidden name beside their place, then renamed.

The name tells who is writing, so that what a killed process left is removed by the next one that writes there.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".tmp"


def write_whole(path: Path, data: bytes) -> None:
    """Make or replace a file, and the folders above it. Raises OSError, leaving what was there before."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its place at the end; whatever is raised leaves what was there before."""
    with _beside(path) as scratch:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write files into, which takes its place at the end, where nothing may be; or nothing appears."""
    with _beside(path) as scratch:
        scratch.mkdir()
        yield scratch
        for file in scratch.rglob("*"):
            _sync(file)
        scratch.rename(path)


def refuse_inside_trace(path: Path) -> None:
    """Raises OSError for a path in the folder of a trace, which holds the files of the trace alone."""
    for folder in path.absolute().parents:
        document = folder / "zarr.json"
        if document.is_file() and b'"moereplay-trace"' in document.read_bytes():
            raise OSError(errno.EINVAL, f"{folder} is a trace, whose files are its own", str(path))


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A hidden name beside the path, which nothing has at the end; folders above are made."""
    refuse_inside_trace(path)
    made = [folder for folder in path.parents if not folder.exists()]
    scratch = scratch_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(path.parent)
        yield scratch
    except BaseException:
        with suppress(OSError):  # if the folder itself is in question, so is what was written into it
            _remove(scratch)
            for folder in made:
                folder.rmdir()
        raise


def _sync(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """A file or a folder, if it is there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def scratch_beside(path: Path) -> Path:
    """Return a hidden name beside the path, which `clear_abandoned` removes once this process has ended."""
    return path.with_name(f".{path.name}.{scratch_name()}{SUFFIX}")


def scratch_name() -> str:
    """host-process-random: who is writing."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_abandoned(name: str) -> bool:
    """Whether the process of a `scratch_name`, with whatever before it, was one of this host and is gone."""
    found = re.search(rf"{re.escape(socket.gethostname())}-(\d+)-\w+$", name)
    return found is not None and not _is_alive(int(found[1]))


@cache
def clear_abandoned(folder: Path) -> None:
    """Remove what killed processes left, once per process: a folder may hold very many results."""
    for left in folder.glob(f".*{SUFFIX}"):
        if is_abandoned(left.name.removesuffix(SUFFIX)):
            _remove(left)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # to ask for a process there is to end it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


# -- Folders that only this user can write into: their content is executed, or read unchecked.

PRIVATE = 0o700
OTHERS = 0o077
OTHERS_WRITE = 0o022


def claimed(path: Path) -> bool:
    """Whether the folder, made if it is not there, is this user's alone and can be written.

    What lies in one of this user's that others could have written into is removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(PRIVATE, exist_ok=True)
        if not (_keeps_its_folders(path.parent) and _is_ours(path.lstat())):
            return False
        if _is_open(path.lstat()):
            shutil.rmtree(path)
            path.mkdir(PRIVATE, exist_ok=True)  # another process may be doing the same
        path.chmod(PRIVATE)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def private_folder(name: str) -> Path:
    """`name` in the user's cache, or in this user's temporary folder. Raises OSError if neither can be written."""
    cache = user_cache()
    if cache is not None and claimed(cache / name):
        return cache / name
    folder = temporary() / name
    folder.mkdir(PRIVATE, exist_ok=True)
    return folder


def user_cache() -> Path | None:
    """This program's folder in the user's cache; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay"
    except RuntimeError:
        return None


def temporary() -> Path:
    """This user's folder in the system's temporary one: all their processes find the same.

    Where somebody else has taken its name it is the first of those that an earlier process made instead.
    """
    folder = Path(tempfile.gettempdir())
    name = f"moereplay-{os.getuid()}" if _has_owners() else "moereplay"
    found = (path for path in (folder / name, *sorted(folder.glob(f"{name}-*"))) if claimed(path))
    return next(found, None) or Path(tempfile.mkdtemp(prefix=f"{name}-"))


def is_private(folder: Path) -> bool:
    """Whether it is a folder, no link to one, of this user, and closed to all others. Raises OSError."""
    found = folder.lstat()
    return _is_ours(found) and not (_has_owners() and found.st_mode & OTHERS)


def is_mine(found: os.stat_result) -> bool:
    """Whether this user owns it."""
    return not _has_owners() or found.st_uid == os.getuid()


def _keeps_its_folders(parent: Path) -> bool:
    """Whether nobody else can rename what lies in it; one of this user's is closed to them."""
    found = parent.stat()
    if not _has_owners() or found.st_mode & stat.S_ISVTX:
        return True
    if _is_open(found) and found.st_uid == os.getuid():
        parent.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
        return True
    return found.st_uid in (0, os.getuid()) and not _is_open(found)


def _is_ours(found: os.stat_result) -> bool:
    """Whether it is a folder of this user's, and no link to one."""
    return stat.S_ISDIR(found.st_mode) and is_mine(found)


def _is_open(found: os.stat_result) -> bool:
    """Whether others may write into it."""
    return _has_owners() and bool(found.st_mode & OTHERS_WRITE)


def _has_owners() -> bool:
    """Not on Windows, where modes say nothing, and homes and temporary folders are the user's own."""
    return hasattr(os, "getuid")
