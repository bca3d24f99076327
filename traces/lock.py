"""Allow one writer per store, by an operating-system lock on `X.zarr.partial.lock`, which also names its holder.

The system releases the lock when the holder's process ends, so the lock file of a killed writer does not block others.
On a file system without locks there is no protection; the file then only names the writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import sys
import weakref
from pathlib import Path

from moereplay.traces.schema import TraceError

LOCK = ".lock"
BEYOND = 1 << 20  #: Windows makes locked bytes unreadable for others, so a byte after the text is locked
LONGEST_NAME = 300
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}


class Lock:
    """Lock held from `Lock(partial)` until `release`, garbage collection or the end of the process."""

    def __init__(self, partial: Path) -> None:
        """Acquire the lock. Raises TraceError naming the process that holds it, and OSError if a write fails."""
        self.path = partial.with_name(partial.name + LOCK)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _taken(self.path, partial)
        self._release = weakref.finalize(self, _release, descriptor, self.path, os.getpid())
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Remove the lock file; safe to repeat."""
        self._release()


def refuse_busy(partial: Path) -> None:
    """Raise TraceError if another process is writing `partial`."""
    path = partial.with_name(partial.name + LOCK)
    if path.exists() or path.is_symlink():
        Lock(partial).release()


def _taken(path: Path, partial: Path) -> int:
    """Return the descriptor of the locked file; retry if an ending holder removed the file that was just opened."""
    while True:
        descriptor = open_in_place(path)
        try:
            lock(descriptor)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            written = os.read(descriptor, LONGEST_NAME).decode(errors="replace")
            holder = written if written.isprintable() and written else "another process"
            os.close(descriptor)
            raise TraceError(f"{partial} is being written by {holder}; wait for it to finish, or stop it") from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def open_in_place(path: Path, flags: int = 0) -> int:
    """Open or create a file to read and write. Raises OSError for a link, a pipe, or a file with several names.

    In a folder that others can write to, a link of that name could make this user overwrite another of their files.
    `flags` are passed to `os.open`. Opening a pipe does not block.
    """
    if path.is_symlink():
        raise _refused(path, "is a link")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFELY | flags, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise _refused(path, "has other names (hard links)" if stat.S_ISREG(found.st_mode) else "is not a file")
    return descriptor


def _refused(path: Path, what: str) -> OSError:
    return OSError(errno.EINVAL, f"{path.name} {what}, where a file is expected (remove it)", str(path))


def lock(descriptor: int) -> None:
    """Lock an open file until it is closed or the process ends; no effect on a file system without locks.

    Raises BlockingIOError if another open file holds the lock.
    """
    try:
        _lock_of_system(descriptor)
    except OSError as refused:
        if refused.errno in HELD:
            raise BlockingIOError from None
        if refused.errno not in NO_LOCKS:
            raise


def _lock_of_system(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, BEYOND, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(descriptor: int, path: Path, owner: int) -> None:
    """Remove the file before closing it, so that a process that has opened it notices. Forked children keep it."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):  # the folder may be read-only by now
        path.unlink(missing_ok=True)
    os.close(descriptor)
    if sys.platform == "win32":  # where an open file cannot be removed
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
