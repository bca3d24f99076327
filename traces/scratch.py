"""Files that appear whole or not at all: written under a hidden name beside their place, synced, and renamed.

The name tells who is writing, so that what a killed process left is removed by the next one that writes there.
"""

from __future__ import annotations

import os
import re
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
    made = [folder for folder in path.parents if not folder.exists()]
    scratch = path.with_name(f".{path.name}.{scratch_name()}{SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path.parent)
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):  # if the folder itself is in question, so is the scratch file
            scratch.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()
        raise


def scratch_name() -> str:
    """host-process-random: who is writing."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_abandoned(name: str) -> bool:
    """Whether the process of a `scratch_name`, with whatever before it, was one of this host and is gone."""
    found = re.search(rf"{re.escape(socket.gethostname())}-(\d+)-\w+$", name)
    return found is not None and not _is_alive(int(found[1]))


@cache
def _clear(folder: Path) -> None:
    """Remove what killed processes left, once per process: a folder may hold very many results."""
    for left in folder.glob(f".*{SUFFIX}"):
        if is_abandoned(left.name.removesuffix(SUFFIX)):
            left.unlink(missing_ok=True)


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
