"""Files and folders that appear whole or not at all: written under a hidden name beside their place, then renamed.

The name tells who is writing, so that what a killed process left is removed by the next one that writes there.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
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
