"""The rules the tree lives by: imports flow one way, torch stays in tracegen, names and sizes stay human."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import policies
from policies import contract
from traces import demand, passes

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("tracegen", "traces", "policies", "simulator", "analysis")
#: What each room may import; `tracegen.live` and `tracegen.calibrate` will be the two named exceptions.
MAY_IMPORT = {
    "traces": {"traces"},
    "policies": {"policies"},
    "simulator": {"simulator", "policies", "traces"},
    "tracegen": {"tracegen", "traces"},
    "analysis": {"analysis", "traces", "simulator.result"},
}
BANNED_NAMES = {"utils", "common", "helpers", "base", "misc", "v2"}
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_imports_flow_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    ours = {name for name in imported(path) if name.split(".")[0] in (*ROOMS, "moereplay")}
    allowed = MAY_IMPORT[room]
    assert {name for name in ours if name.split(".")[0] not in allowed and name not in allowed} == set()


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_torch_is_imported_by_tracegen_only(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert path.relative_to(ROOT).parts[0] == "tracegen" or not roots & {"torch", "transformers"}


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_files_have_one_reason_and_a_human_size(path):
    lines = path.read_text().splitlines()
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert path.stem not in BANNED_NAMES
    assert len(lines) <= 400
    assert max([(node.end_lineno or 0) - node.lineno + 1 for node in functions], default=0) <= 60


def test_every_package_is_listed_by_name():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert listed == {".".join(path.relative_to(ROOT).parent.parts) for path in SOURCES if path.name == "__init__.py"}


def test_numbers_that_two_rooms_must_agree_on_are_the_same():
    """Neither room may import the other, so each has its own."""
    ours = (contract.UNIT, contract.NEVER, contract.PREFILL, contract.DECODE)
    assert ours == (demand.UNIT, demand.NEVER, passes.PREFILL, passes.DECODE)


def test_every_policy_file_is_listed_by_one_word():
    for kind, names in policies.NAMES.items():
        files = {path.stem for path in (ROOT / "policies" / kind).glob("*.py")} - {"__init__"}
        assert files == set(names)


def test_helping_oneself_imports_nothing_slow():
    """`--help` answers in well under a second because of this."""
    slow = ("numpy", "polars", "zarr", "matplotlib", "pydantic", "simpy")
    script = f"import sys, moereplay; print([name for name in {slow} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
