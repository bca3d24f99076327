"""Machine code kept on disk, in a folder whose name is a hash of everything that it was made from.

Numba looks at the file of a function and at no other, so that an edit of a function that it calls would go unseen; a
folder of its own for every state of the sources cannot be stale. A file that cannot be read back is thrown away and
made again. Processes may share a folder: numba writes a file beside its place and renames it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Any

import numba
from llvmlite import binding
from numba.core import config
from numba.core.errors import NumbaError

from traces.private import private_folder

ROOT = Path(__file__).resolve().parents[3]
#: Rooms whose sources end up in machine code, or decide what it means.
SOURCES = ("policies", "results", "simulator", "traces")
#: Folders in them that machine code cannot reach: an edit there compiles nothing anew.
APART = ("simulator/reference", "traces/importers")
PACKAGES = ("numba", "llvmlite", "numpy")
#: Folders of other states of the sources go when no process has used them for so long.
KEPT_SECONDS = 7 * 24 * 3600
SETTINGS: Any = config  # its attributes are set when it is imported
#: Numba compiles one function at a time, and has one cache folder for the whole process.
COMPILING = RLock()


def compile_kept(signature: Any, function: Callable, **options: Any) -> Callable:
    """`function` as machine code of that signature, from disk where it is there. Raises NumbaError."""
    compiler = numba.njit(signature, **options)
    if not Path(function.__code__.co_filename).is_file():  # typed into a session
        return compiler(function)
    for _ in range(2):
        try:
            return _kept(signature, function, options)
        except NumbaError:
            raise
        except OSError:  # a full disk, too many open files: what is there may serve another process
            break
        except Exception:  # a truncated file fails in as many ways as there are bytes in it
            _throw_away(function)
    return compiler(function)


def compile_unkept(signature: Any, function: Callable, **options: Any) -> Callable:
    """The same for what no name on disk can stand for."""
    with COMPILING:
        return numba.njit(signature, **options)(function)


def _kept(signature: Any, function: Callable, options: dict[str, Any]) -> Callable:
    with COMPILING, _numba_keeps_in(folder()):
        return numba.njit(signature, cache=True, **options)(function)


def _throw_away(function: Callable) -> None:
    """Every file of a function; the rest of the folder is worth minutes."""
    name = function.__qualname__.replace("<", "").replace(">", "")  # as numba spells it
    for path in folder().glob(f"*/*.{escape(name)}-*"):
        with suppress(OSError):
            path.unlink()


@contextmanager
def _numba_keeps_in(path: Path) -> Iterator[None]:
    before = SETTINGS.CACHE_DIR
    SETTINGS.CACHE_DIR = str(path)
    try:
        yield
    finally:
        SETTINGS.CACHE_DIR = before


def is_kept(name: str) -> bool:
    """Whether a function of that name lies in the folder."""
    return any(folder().glob(f"*/{name}*.nbi"))


@cache
def folder() -> Path:
    """Where this state of the sources keeps its machine code: below the user's cache, or in the temporary folder.

    It is the user's alone (traces/private.py), and every process of theirs finds the same.
    """
    path = private_folder(f"compiled-{state_of_sources()}")
    os.utime(path)
    _forget_unused(path.parent)
    return path


def _forget_unused(home: Path) -> None:
    """Another process may be doing the same, or start to use one: it compiles again."""
    oldest = time.time() - KEPT_SECONDS
    for path in home.glob("compiled-*"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path)


@cache
def state_of_sources() -> str:
    """A hash of all sources, of the versions that compile them, and of the processor."""
    hasher = sha256()
    for path in _source_files():
        hasher.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    versions = [sys.version, *(version(package) for package in PACKAGES)]
    hasher.update("\0".join([*versions, platform.machine(), binding.get_host_cpu_name()]).encode())
    return hasher.hexdigest()[:20]


def _source_files() -> list[Path]:
    files = (path for room in SOURCES for path in (ROOT / room).rglob("*.py"))
    return sorted(path for path in files if not any(path.is_relative_to(ROOT / room) for room in APART))
