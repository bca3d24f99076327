"""A folder that only this user can write: what lies there is ours, whoever else has an account on the machine."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def private_folder(name: str) -> Path | None:
    """`name` in the user's cache, or in a folder of the user in the system's temporary one; None if neither will do."""
    for home in _homes():
        folder = home / name
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if is_private(folder):
                return folder
        except OSError:
            continue
    return None


def user_cache() -> Path | None:
    """This program's folder in the user's cache; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moereplay"
    except RuntimeError:
        return None


def is_private(folder: Path) -> bool:
    """Whether it is a folder, no link to one, of this user, and closed to all others."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and is_mine(found) and not (USERS and found.st_mode & 0o077)


def is_mine(found: os.stat_result) -> bool:
    """Whether this user owns it."""
    return not USERS or found.st_uid == os.getuid()


USERS = hasattr(os, "getuid")  #: elsewhere (Windows) a user's folders are closed to others by default


def _homes() -> Iterator[Path]:
    cache = user_cache()
    if cache is not None:
        yield cache
    yield Path(tempfile.gettempdir()) / (f"moereplay-{os.getuid()}" if USERS else "moereplay")
