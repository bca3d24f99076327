"""Machine code on disk, in a folder named by a hash of everything that it was made from.

A file is an object file after its hash; damaged files are deleted and made again. LLVM loads a file without Numba,
whose import takes longer than a short replay. Processes may share a folder: files are written under a temporary name
and renamed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import distribution
from io import FileIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import RLock
from typing import Any, NamedTuple

from llvmlite import binding

from moereplay.traces.documents import json_text
from moereplay.traces.files import forget_unused, private_folder

ROOT = Path(__file__).resolve().parents[2]
#: Packages whose sources become machine code, or determine its meaning.
SOURCES = ("policies", "results", "simulator", "traces")
#: Folders that machine code cannot reach: an edit there causes no compilation.
APART = ("simulator/reference", "traces/importers")
PACKAGES = ("numba", "llvmlite", "numpy")
#: Folders of other states of the sources are deleted when no process has used them for this long.
KEPT_SECONDS = 7 * 24 * 3600
ENDING = ".code"
LEVEL = 3  #: of optimization, as in Numba
#: Numba compiles one function at a time.
COMPILING = RLock()
_loaded: list[Any] = []  # engines own the code


class Built(NamedTuple):
    """An object file, the name of its entry, and its undefined symbols."""

    code: bytes
    entry: str
    undefined: list[str]


class DamagedError(Exception):
    """A file does not match its hash, or needs symbols that this process does not have."""


def kept(name: str, build: Callable[[], Built]) -> int:
    """Return the address of the code under a name; if there is none, `build` makes it, and may raise."""
    with COMPILING:
        path = _path(name)
        try:
            return _load(_read(path))
        except DamagedError:
            with suppress(OSError):
                path.unlink()
        except OSError:  # no file; or too many open files, and other processes may still use this one
            pass
        made = build()
        with suppress(OSError):  # e.g. a full disk
            _write(path, made)
        return _load(made)


def unkept(build: Callable[[], Built]) -> int:
    """Return the address of code that is not kept on disk."""
    with COMPILING:
        return _load(build())


def is_kept(name: str) -> bool:
    """Return whether code of this name is on disk."""
    return _path(name).is_file()


def any_kept(prefix: str) -> bool:
    """Return whether code with this prefix is on disk."""
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
    """Load an object file. Resolves undefined symbols first: MCJIT aborts the process on an unknown one."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    if not _are_known(made.undefined):
        from numba import njit  # takes half a second

        njit("int64()")(lambda: 0)  # compiling anything registers the symbols of Numba's runtime with LLVM
        if not _are_known(made.undefined):
            raise DamagedError
    engine.add_object_file(binding.ObjectFileRef.from_data(made.code))
    engine.finalize_object()
    _loaded.append(engine)
    return engine.get_function_address(made.entry)


def _are_known(names: list[str]) -> bool:
    return all(binding.address_of_symbol(name) is not None for name in names)


def _machine(**options: Any) -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True, **options)


def machine_code_of(text: str, entry: str) -> Built:
    """Compile a module in LLVM's language for this processor."""
    machine = _machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=LEVEL, reloc="static"
    )
    module = binding.parse_assembly(text)
    module.triple, module.data_layout = binding.get_process_triple(), str(machine.target_data)
    code, undefined = optimised(module, machine, vectorised=False)
    return Built(code, entry, undefined)


def optimised(module: Any, machine: Any, vectorised: bool) -> tuple[bytes, list[str]]:
    """Optimize a module; return its machine code and the names of its undefined symbols.

    `vectorised`: vectorize loops; False where most loops have few iterations.
    """
    options = binding.create_pipeline_tuning_options(speed_level=LEVEL)
    options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = vectorised
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code = machine.emit_object(module)
    undefined = [each.name for each in symbols(module) if each.is_declaration]
    return code, [name for name in undefined if not name.startswith("llvm.")]


def symbols(module: Any) -> list[Any]:
    """Return the functions and variables of a module."""
    return [*module.functions, *module.global_variables]


@cache
def folder() -> Path:
    """Return the folder for the current sources, below the user's cache or in the temporary folder.

    The folder is private (traces/files.py), and all of the user's processes find the same one.
    """
    path = private_folder(f"compiled-{state_of_sources()}")
    os.utime(path)
    forget_unused(path.parent, "compiled-*", KEPT_SECONDS)
    return path


@cache
def state_of_sources() -> str:
    """Return a hash of all sources, the compiling versions and the processor."""
    return sha256("\0".join([digest_of_sources(), *versions()]).encode()).hexdigest()[:20]


def digest_of_sources() -> str:
    """Return a hash of all sources, the same on every machine."""
    hasher = sha256()
    for names, path in sorted(each for package in SOURCES for each in _sources([package], str(ROOT / package))):
        with FileIO(path) as file:
            hasher.update(f"{'/'.join(names)}\0".encode() + file.readall())
    return hasher.hexdigest()


def _sources(names: list[str], folder: str) -> Iterator[tuple[list[str], str]]:
    """Yield the files of a folder that machine code can reach: names below ROOT, path. `Path` takes twice the time."""
    for entry in os.scandir(folder):
        below = [*names, entry.name]
        if entry.is_dir():
            if "/".join(below) not in APART:
                yield from _sources(below, entry.path)
        elif entry.name.endswith(".py"):
            yield below, entry.path


def versions() -> list[str]:
    """Return the versions of all compiling packages, and the processor."""
    return [sys.version, *map(version, PACKAGES), platform.machine(), binding.get_host_cpu_name()]


def version(package: str) -> str:
    """Return the version of a package from its metadata; to parse all of it would take the parser of mail."""
    of = distribution(package)
    found = re.search(r"^Version: *(\S+)", of.read_text("METADATA") or "", re.MULTILINE)
    return found[1] if found else of.version
