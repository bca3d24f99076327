"""Folders that only this user can write into: their content is executed, or read unchecked.

Machine code is kept with pickles, and a pickle is a program; it indexes by derived arrays. So a folder is used
only if it is a real one of this user's that nobody else may enter, and if nobody else can put another one in its place.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

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
