"""The name of a hook's machine code on disk: a digest of everything that goes into the code."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moereplay.policies import catalogue
from moereplay.policies.contract import Eviction, PolicyError
from moereplay.policies.hooks import given_by
from moereplay.simulator.compiled import hooks
from moereplay.simulator.jit import machine_code
from moereplay.simulator.jit.reached import digest, reached_from
from tests.kit.every import every
from tests.kit.file_modules import module_at

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    path = tmp_path / "kept"
    path.mkdir()
    monkeypatch.setattr(machine_code, "folder", lambda: path)
    return path


POLICY = """
from moereplay.policies.contract import Eviction, PolicyError
from ranking import FACTOR, rank


def key(now, experts, copies, own, y):
    return FACTOR * rank(experts[y // now["precisions"]]["last_use"])


POLICY = Eviction(name="mine", summary="by a rank from another file", source="-", key=key)
"""
REPLAY_BY_BOTH = """
import json, sys
import moereplay.policies.eviction
from moereplay import policies
from pathlib import Path
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace

policies.NAMES["eviction"] += ("mine",)
policies.eviction.__path__.append(sys.argv[1])
trace = open_trace(Path(sys.argv[2]))
configs = [configure(capacity="20%", scope="per_layer", eviction=name) for name in ("mine", "lru")]
print(json.dumps([replay(trace, config, engine=sys.argv[3]).totals["hits"] for config in configs]))
"""

OLDEST, NEWEST = "return last_use", "return -last_use"


def write_policy(folder: Path, body: str, factor: int = 1) -> None:
    (folder / "mine.py").write_text(POLICY)
    (folder / "ranking.py").write_text(f"FACTOR = {factor}\n\n\ndef rank(last_use):\n    {body}\n")


def hits(folder: Path, engine: str) -> list[int]:
    """Hits of the user's policy and of LRU, from a child process that shares this process's cache."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    sample = folder / "sample.zarr"
    if not sample.exists():
        shutil.copytree(ROOT / "traces" / "samples" / "miniature.zarr", sample)
    command = [sys.executable, "-W", "error", "-c", REPLAY_BY_BOTH, str(folder), str(sample), engine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_an_edit_of_a_users_helper_in_another_file_is_seen(tmp_path: Path) -> None:
    write_policy(tmp_path, OLDEST)
    mine, lru = hits(tmp_path, "compiled")
    assert mine == lru
    write_policy(tmp_path, NEWEST)
    mine, lru = hits(tmp_path, "compiled")
    assert mine != lru
    assert [mine, lru] == hits(tmp_path, "reference")


def name_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compile a user's key and return the name of its code."""
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
    names = []
    for body, factor in ((OLDEST, 1), (OLDEST, 1), (NEWEST, 1), (OLDEST, 2)):
        write_policy(tmp_path, body, factor)
        names.append(name_of(tmp_path, monkeypatch))
    assert names[0] == names[1]
    assert len(set(names)) == 3


@pytest.mark.slow
def test_a_hook_that_does_not_compile_is_refused_with_the_reason(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_policy(tmp_path, "return {last_use: 'text'}")
    with pytest.raises(PolicyError, match=r"eviction mine: hook key does not compile \((?!Failed in).+\); replay it"):
        name_of(tmp_path, monkeypatch)
    assert not list(folder.iterdir())


#: Ways to reach a number N in `another.py`, next to the policy's file.
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


@every("way", WAYS_TO_A_NUMBER)
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
    """Code from before the edit must not be kept under the name of the code after it."""
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


@pytest.mark.slow
def test_what_the_hash_leaves_out_cannot_be_reached_from_machine_code() -> None:
    """Check all modules of the project that machine code imports, directly or not, anywhere in a file."""
    waiting = [path for package in ("compiled", "curves") for path in (ROOT / "simulator" / package).rglob("*.py")]
    waiting += [path for path in (ROOT / "simulator" / "limits").glob("*.py") if "= compiled(" in path.read_text()]
    reached = set(waiting)
    while waiting:
        fresh = set(files_imported_by(waiting.pop())) - reached
        reached |= fresh
        waiting += fresh
    apart = [ROOT / package for package in machine_code.APART]
    assert all(package.is_dir() for package in apart)
    assert [path for path in reached if any(path.is_relative_to(package) for package in apart)] == []


def files_imported_by(path: Path) -> Iterator[Path]:
    """Yield the project's files; for `from package import name` both the package and the module of that name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            stem = ROOT / name.replace(".", "/")
            yield from (found for found in (stem.with_suffix(".py"), stem / "__init__.py") if found.is_file())
