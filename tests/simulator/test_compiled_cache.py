"""Machine code on disk: made once, never stale, and never in the way."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from policies import catalogue
from policies.contract import Eviction, PolicyError
from policies.hooks import given_by
from simulator.compiled.runtime import compiling, hooks, machine_code
from simulator.compiled.runtime.calls import Compiled
from simulator.compiled.runtime.reached import digest, reached_from

ROOT = Path(__file__).resolve().parents[2]
DAY = 24 * 3600


def module_at(path: Path) -> ModuleType:
    """A file as a module, read anew."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    """What a function writes, as machine code that is looked for anew."""
    into = np.zeros(1, np.int64)
    Compiled(function)(n, into)  # pyright: ignore[reportArgumentType]
    return int(into[0])


def files(folder: Path) -> dict[str, int]:
    """Sizes by name."""
    return {path.name: path.stat().st_size for path in folder.iterdir()}


# keeping


def test_a_function_is_compiled_once_and_then_read(folder: Path, double: Callable, builds: list[str]) -> None:
    assert [result(double, 4), result(double, 5)] == [8, 10]
    assert builds == ["double"]
    assert [machine_code.is_kept(Path(name).stem) for name in files(folder)] == [True]
    assert not machine_code.is_kept("triple")


@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.99])
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
    """LLVM would end the process."""
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


def test_processes_that_compile_at_once_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text("def double(n, into):\n    into[0] = 2 * n\n")
    script = (
        "import sys, numpy; from double import double\n"
        "from simulator.compiled.runtime.calls import Compiled\n"
        "into = numpy.zeros(1, int); Compiled(double)(21, into); print(into[0], 'numba' in sys.modules)"
    )
    started = [python(script, tmp_path) for _ in range(3)]
    assert {said(process)[0] for process in started} == {"42"}
    assert said(python(script, tmp_path)) == ["42", "False"]


def python(script: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own, whose caches lie in `folder` and which may import from there."""
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
    """Sources of another project in the same three rooms."""
    for room in machine_code.SOURCES:
        (tmp_path / "tree" / room).mkdir(parents=True)
    (tmp_path / "tree" / "policies" / "selection.py").write_text("DEPTH = 1\n")
    monkeypatch.setattr(machine_code, "ROOT", tmp_path / "tree")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "tree"


def fresh_folder() -> Path:
    """What a new process would find."""
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
    """As a umask of 002 left it, which many systems have."""
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
    """Too many open files, say: it compiles for itself."""
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


def test_folders_that_nobody_used_for_a_week_go(tree: Path) -> None:
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


# policies outside of the tree

POLICY = """
from policies.contract import Eviction, PolicyError
from ranking import FACTOR, rank


def key(now, experts, copies, own, y):
    return FACTOR * rank(experts[y // now["precisions"]]["last_use"])


POLICY = Eviction(name="mine", summary="by a rank from another file", source="-", key=key)
"""
OLDEST, NEWEST = "return last_use", "return -last_use"
REPLAY_BY_BOTH = """
import json, sys
import policies, policies.eviction
from pathlib import Path
from simulator.config import configure
from simulator.replay import replay
from traces.store import open_trace

policies.NAMES["eviction"] += ("mine",)
policies.eviction.__path__.append(sys.argv[1])
trace = open_trace(Path(sys.argv[2]))
configs = [configure(capacity="20%", scope="per_layer", eviction=name) for name in ("mine", "lru")]
print(json.dumps([replay(trace, config, engine=sys.argv[3]).totals["hits"] for config in configs]))
"""


def write_policy(folder: Path, body: str, factor: int = 1) -> None:
    (folder / "mine.py").write_text(POLICY)
    (folder / "ranking.py").write_text(f"FACTOR = {factor}\n\n\ndef rank(last_use):\n    {body}\n")


def hits(folder: Path, engine: str) -> list[int]:
    """Of the user's policy and of LRU, by a process of its own that shares this one's cache."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    sample = folder / "sample.zarr"
    if not sample.exists():
        shutil.copytree(ROOT / "traces" / "samples" / "miniature.zarr", sample)
    command = [sys.executable, "-W", "error", "-c", REPLAY_BY_BOTH, str(folder), str(sample), engine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_edit_of_a_users_helper_in_another_file_is_seen(tmp_path: Path) -> None:
    write_policy(tmp_path, OLDEST)
    mine, lru = hits(tmp_path, "compiled")
    assert mine == lru
    write_policy(tmp_path, NEWEST)
    mine, lru = hits(tmp_path, "compiled")
    assert mine != lru
    assert [mine, lru] == hits(tmp_path, "reference")


def name_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Under which a user's key is kept."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would not notice an edit within a second
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "ranking", raising=False)
    policy = module_at(folder / "mine.py").POLICY
    assert isinstance(policy, Eviction)
    hooks.compiled("key", policy)
    return hooks.name_of("key", policy.key, policy.kind, policy.may_read, checked=False)  # pyright: ignore[reportArgumentType]


def test_a_hook_is_kept_under_a_name_made_of_all_that_went_into_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is imported counts too, though no function is reached in its file."""
    names = []
    for body, factor in ((OLDEST, 1), (OLDEST, 1), (NEWEST, 1), (OLDEST, 2)):
        write_policy(tmp_path, body, factor)
        names.append(name_of(tmp_path, monkeypatch))
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_hook_that_does_not_compile_is_refused_with_the_reason(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_policy(tmp_path, "return {last_use: 'text'}")
    with pytest.raises(PolicyError, match=r"eviction mine: hook key does not compile \((?!Failed in).+\); replay it"):
        name_of(tmp_path, monkeypatch)
    assert not files(folder)


def test_a_number_from_a_file_without_functions_changes_the_name(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for factor in (1, 2):
        write_policy(tmp_path, OLDEST)
        (tmp_path / "factors.py").write_text(f"FACTOR = {factor}\n")
        (tmp_path / "mine.py").write_text(
            POLICY.replace("import FACTOR, rank", "import rank\nfrom factors import FACTOR")
        )
        monkeypatch.delitem(sys.modules, "factors", raising=False)
        names.append(name_of(tmp_path, monkeypatch))
    assert names[0] != names[1]


#: Ways to a number N of `another.py`, a file beside the policy's.
WAYS_TO_A_NUMBER = {
    "a module's constant": "import another\n{key}another.N",
    "a constant of a module's module": "import between\n{key}between.another.N",
    "a module's function": "import another\n{key}another.number()",
    "an imported function": "from another import number\n{key}number()",
    "a default argument": "from another import N\ndef key(now, experts, copies, own, y, n=N):\n    return n",
    "a keyword's default": "from another import N\ndef of(*, n=N):\n    return n\n{key}of()",
    "a closure": "from another import N\ndef made(n):\n    {inner}n\n    return key\nkey = made(N)",
    "a function in a closure": "import another as a\ndef made(f):\n    {inner}f()\n    return key\nkey=made(a.number)",
    "a tuple": "from another import N\nALL = (1, (2, N))\n{key}ALL[1][1]",
    "an array": "from another import N\nimport numpy\nALL = numpy.array([N])\n{key}ALL[0]",
    "an enumeration": "from another import N\nimport enum\nAll = enum.IntEnum('All', {{'A': N}})\n{key}All.A.value",
    "a compiled function": "import numba\nfrom another import number\nof = numba.njit(number)\n{key}of()",
}
KEY = {
    "key": "def key(now, experts, copies, own, y):\n    return ",
    "inner": "def key(now, experts, copies, own, y):\n        return ",
}


@pytest.mark.parametrize("way", WAYS_TO_A_NUMBER)
def test_every_number_that_a_hook_reaches_is_part_of_the_name(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "between.py").write_text("import another\n")
    (tmp_path / "mine.py").write_text(WAYS_TO_A_NUMBER[way].format(**KEY))
    names = []
    for number in (1, 1, 2):
        (tmp_path / "another.py").write_text(f"N = {number}\ndef number():\n    return {number}\n")
        for name in ("another", "between"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        names.append(digest(reached_from(module_at(tmp_path / "mine.py").key)))
    assert names[0] == names[1] != names[2]
    assert None not in names


def test_an_edit_since_a_file_was_read_does_not_count(tmp_path: Path) -> None:
    """Code of before the edit must not be kept under the name of the code after it."""
    (tmp_path / "double.py").write_text("def double(n):\n    return 2 * n\n")
    double = module_at(tmp_path / "double.py").double
    before = digest(reached_from(double))
    longer = "def double(n):\n    return n + n + n\n"  # of another size, by which Python finds old bytecode
    (tmp_path / "double.py").write_text(longer)
    assert digest(reached_from(double)) == before != digest(reached_from(module_at(tmp_path / "double.py").double))


def test_code_that_reaches_what_no_name_can_stand_for_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("ANY = object()\ndef key(now, experts, copies, own, y):\n    return y or ANY\n")
    assert digest(reached_from(module_at(tmp_path / "mine.py").key)) is None


def test_machine_code_of_every_hook_that_ships_has_a_name() -> None:
    found = [digest(reached_from(hook)) for policy in catalogue() for _, hook in given_by(policy)]
    assert found and None not in found


def test_what_the_hash_leaves_out_cannot_be_reached_from_machine_code() -> None:
    """Every module of ours that the compiled engine or the curves import, however deep, and wherever in a file."""
    waiting = [*(ROOT / "simulator" / "compiled").rglob("*.py"), *(ROOT / "simulator" / "curves").rglob("*.py")]
    reached = set(waiting)
    while waiting:
        fresh = set(files_imported_by(waiting.pop())) - reached
        reached |= fresh
        waiting += fresh
    apart = [ROOT / room for room in machine_code.APART]
    assert all(room.is_dir() for room in apart)
    assert [path for path in reached if any(path.is_relative_to(room) for room in apart)] == []


def files_imported_by(path: Path) -> Iterator[Path]:
    """Of our own modules; of `from package import name`, the package and the module of that name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            stem = ROOT / name.replace(".", "/")
            yield from (found for found in (stem.with_suffix(".py"), stem / "__init__.py") if found.is_file())
