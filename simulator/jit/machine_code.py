"""Machine code kept on disk, in a folder whose name is a hash of everything that it was made from.

A file is an object file of the compiler's behind a hash of it: what is not whole is thrown away and made again. LLVM
loads it without the compiler, whose import takes longer than a short replay. Processes may share a folder: a file is
written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import RLock
from typing import Any, NamedTuple

from llvmlite import binding

from moereplay.traces.documents import json_text
from moereplay.traces.files import private_folder

ROOT = Path(__file__).resolve().parents[2]
#: Packages whose sources end up in machine code, or decide what it means.
SOURCES = ("policies", "results", "simulator", "traces")
#: Folders in them that machine code cannot reach: an edit there compiles nothing anew.
APART = ("simulator/reference", "traces/importers")
PACKAGES = ("numba", "llvmlite", "numpy")
#: Folders of other states of the sources go when no process has used them for so long.
KEPT_SECONDS = 7 * 24 * 3600
ENDING = ".code"
#: Numba compiles one function at a time.
COMPILING = RLock()
_loaded: list[Any] = []  # engines, which own the code


class Built(NamedTuple):
    """What is kept: an object file, the name of its entry, and of all that it does not define."""

    code: bytes
    entry: str
    undefined: list[str]


class DamagedError(Exception):
    """A file is not what was written."""


def kept(name: str, build: Callable[[], Built]) -> int:
    """The address of the code kept under a name; where there is none `build` makes it, and may raise."""
    with COMPILING:
        path = _path(name)
        try:
            return _load(_read(path))
        except DamagedError:
            with suppress(OSError):
                path.unlink()
        except OSError:  # not there; or too many open files: what is there may serve another process
            pass
        made = build()
        with suppress(OSError):  # a full disk
            _write(path, made)
        return _load(made)


def unkept(build: Callable[[], Built]) -> int:
    """The address of code for which no name on disk can stand."""
    with COMPILING:
        return _load(build())


def is_kept(name: str) -> bool:
    """Whether code of that name lies in the folder."""
    return _path(name).is_file()


def any_kept(prefix: str) -> bool:
    """Whether code of a name that begins so lies in the folder."""
    return any(folder().glob(f"{_plain(prefix)}_*{ENDING}"))


def _path(name: str) -> Path:
    return folder() / (_plain(name) + ENDING)


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _read(path: Path) -> Built:
    digest, _, rest = path.read_bytes().partition(b"\n")
    if digest.decode(errors="replace") != sha256(rest).hexdigest():
        raise DamagedError
    head, _, code = rest.partition(b"\n")
    entry, undefined = json.loads(head)
    return Built(code, entry, undefined)


def _write(path: Path, made: Built) -> None:
    rest = json_text([made.entry, made.undefined]).encode() + b"\n" + made.code
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(sha256(rest).hexdigest().encode() + b"\n" + rest)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _load(made: Built) -> int:
    """Into memory. LLVM ends the process where a name is not known, so that is looked at first."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    if not _are_known(made.undefined):
        from moereplay.simulator.jit.internals import register_runtime  # numba takes half a second to import

        register_runtime()
        if not _are_known(made.undefined):
            raise DamagedError
    engine.add_object_file(binding.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    _loaded.append(engine)
    return engine.get_function_address(made.entry)


def _are_known(names: list[str]) -> bool:
    return all(binding.address_of_symbol(name) is not None for name in names)


def _machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)


@cache
def folder() -> Path:
    """Where this state of the sources keeps its machine code: below the user's cache, or in the temporary folder.

    It is the user's alone (traces/files.py), and every process of theirs finds the same.
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
    hasher.update("\0".join(versions()).encode())
    return hasher.hexdigest()[:20]


def versions() -> list[str]:
    """Versions of what compiles, and the processor."""
    packages = [version(package) for package in PACKAGES]
    return [sys.version, *packages, platform.machine(), binding.get_host_cpu_name()]


def _source_files() -> list[Path]:
    files = (path for package in SOURCES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in files if not any(path.is_relative_to(ROOT / package) for package in APART))
