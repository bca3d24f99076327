"""Machine code on disk is compiled once, never stale, and replaced when it is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.jit import compiling, machine_code
from moereplay.simulator.jit.calls import Compiled
from tests.kit.file_modules import module_at

ROOT = Path(__file__).resolve().parents[2]
DAY = 24 * 3600


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    path = tmp_path / "kept"
    path.mkdir()
    monkeypatch.setattr(machine_code, "folder", lambda: path)
    return path


@pytest.fixture
def double(tmp_path: Path) -> Callable:
    """A function in a file."""
    path = tmp_path / "double.py"
    path.write_text("def double(n, into):\n    into[0] = 2 * n\n")
    return module_at(path).double


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was compiled."""
    names, build = list[str](), compiling.built

    def noted(function: FunctionType, *given: Any, **options: Any) -> machine_code.Built:
        names.append(function.__name__)
        return build(function, *given, **options)

    monkeypatch.setattr(compiling, "built", noted)
    return names


def result(function: Callable, n: int) -> int:
    """Load a function's machine code again and return what it writes."""
    into = np.zeros(1, np.int64)
    Compiled(function)(n, into)  # pyright: ignore[reportArgumentType]
    return int(into[0])


def files(folder: Path) -> dict[str, int]:
    """Return file sizes by name."""
    return {path.name: path.stat().st_size for path in folder.iterdir()}


# keeping


def test_a_function_is_compiled_once_and_then_read(folder: Path, double: Callable, builds: list[str]) -> None:
    assert [result(double, 4), result(double, 5)] == [8, 10]
    assert builds == ["double"]
    assert [machine_code.is_kept(Path(name).stem) for name in files(folder)] == [True]
    assert not machine_code.is_kept("triple")


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_truncated_file_is_made_again(folder: Path, double: Callable, builds: list[str], left: float) -> None:
    result(double, 1)
    (name, size), *_ = files(folder).items()
    (folder / name).write_bytes((folder / name).read_bytes()[: int(left * size)])
    assert result(double, 21) == 42
    assert files(folder) == {name: size}
    assert result(double, 4) == 8
    assert builds == ["double"] * 2


def test_a_file_in_which_one_byte_is_another_is_made_again(folder: Path, double: Callable, builds: list[str]) -> None:
    result(double, 1)
    path = next(folder.iterdir())
    damaged = bytearray(path.read_bytes())
    damaged[-9] ^= 1
    path.write_bytes(damaged)
    assert result(double, 21) == 42
    assert builds == ["double"] * 2


def test_code_that_needs_what_this_process_has_not_is_made_again(
    folder: Path, double: Callable, builds: list[str]
) -> None:
    """LLVM would abort the process at an unknown symbol."""
    result(double, 1)
    path = next(folder.iterdir())
    whole = machine_code._read(path)
    machine_code._write(path, whole._replace(undefined=["of_another_time"]))
    assert result(double, 21) == 42
    assert machine_code._read(path).undefined == whole.undefined
    assert builds == ["double"] * 2


def test_only_the_damaged_function_is_thrown_away(
    folder: Path, double: Callable, builds: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "other.py"
    path.write_text("def other(n, into):\n    into[0] = n - 1\n")
    other = module_at(path).other
    assert [result(double, 1), result(other, 1)] == [2, 0]
    next(folder.glob("double*")).write_bytes(b"")
    assert [result(double, 2), result(other, 2)] == [4, 1]
    assert builds == ["double", "other", "double"]


def test_a_full_disk_loses_nothing_but_the_file(
    folder: Path, double: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine_code, "NamedTemporaryFile", full)
    assert result(double, 21) == 42
    assert not files(folder)


@pytest.mark.slow
def test_processes_that_compile_at_once_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text("def double(n, into):\n    into[0] = 2 * n\n")
    script = (
        "import sys, numpy; from double import double\n"
        "from moereplay.simulator.jit.calls import Compiled\n"
        "into = numpy.zeros(1, int); Compiled(double)(21, into); print(into[0], 'numba' in sys.modules)"
    )
    started = [python(script, tmp_path) for _ in range(2)]
    assert {said(process)[0] for process in started} == {"42"}
    assert said(python(script, tmp_path)) == ["42", "False"]


def python(script: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that imports from `folder` and keeps its caches there."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out.split()


# where


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of another project with the same packages."""
    for package in machine_code.SOURCES:
        (tmp_path / "tree" / package).mkdir(parents=True)
    (tmp_path / "tree" / "policies" / "selection.py").write_text("DEPTH = 1\n")
    monkeypatch.setattr(machine_code, "ROOT", tmp_path / "tree")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "tree"


def fresh_folder() -> Path:
    """Return the folder that a new process would use."""
    machine_code.state_of_sources.cache_clear()
    try:
        return machine_code.folder.__wrapped__()
    finally:
        machine_code.state_of_sources.cache_clear()


def test_the_folder_is_named_by_all_sources(tree: Path) -> None:
    first = fresh_folder()
    assert fresh_folder() == first
    (tree / "policies" / "selection.py").write_text("DEPTH = 2\n")
    second = fresh_folder()
    (tree / "traces" / "new.py").write_text("")
    assert len({first, second, fresh_folder()}) == 3


def test_the_folder_is_named_by_the_versions_that_compile(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fresh_folder()
    monkeypatch.setattr(machine_code, "version", lambda package: "99" if package == "llvmlite" else "1")
    assert fresh_folder() != first


def test_a_home_that_cannot_be_written_gives_way_to_the_temporary_folder_for_every_process(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a file where the folder should be: permissions do not stop the superuser
    (tmp_path / "home").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = fresh_folder()
    assert found.parent == tmp_path / f"moereplay-{os.getuid()}"
    assert [found.stat().st_mode & 0o777, found.parent.stat().st_mode & 0o777] == [0o700, 0o700]
    assert fresh_folder() == found


def test_machine_code_that_others_could_have_written_is_not_read(tree: Path) -> None:
    """A umask of 002, common on many systems, leaves group-writable folders."""
    first = fresh_folder()
    (first / "planted.code").write_text("")
    first.chmod(0o775)
    assert fresh_folder() == first
    assert list(first.iterdir()) == []
    assert first.stat().st_mode & 0o777 == 0o700


def test_the_folder_is_private_whatever_the_umask(tree: Path) -> None:
    before = os.umask(0o002)
    try:
        found = fresh_folder()
    finally:
        os.umask(before)
    assert [found.stat().st_mode & 0o777, found.parent.stat().st_mode & 0o777] == [0o700, 0o755]


def test_what_one_process_cannot_read_is_left_for_the_others(
    folder: Path, double: Callable, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too many open files, for example, a process compiles for itself."""
    result(double, 1)
    before = files(folder)

    def refused(*given: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(machine_code, "_read", refused)
        patch.setattr(machine_code, "_write", refused)
        assert result(double, 21) == 42
    assert files(folder) == before
    assert result(double, 4) == 8
    assert builds == ["double"] * 2


def test_folders_unused_for_a_week_are_deleted(tree: Path) -> None:
    own = fresh_folder()
    old, recent, foreign = (own.parent / name for name in ("compiled-old", "compiled-recent", "derived-old"))
    for path, days in ((own, 30), (old, 8), (recent, 6), (foreign, 30)):
        path.mkdir(exist_ok=True)
        (path / "kernel.code").write_text("")
        then = time.time() - days * DAY
        os.utime(path, (then, then))
    assert fresh_folder() == own
    assert [path.exists() for path in (own, old, recent, foreign)] == [True, False, True, True]
    assert own.stat().st_mtime > time.time() - DAY
