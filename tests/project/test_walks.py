"""Files that common changes touch: patches in benchmarks/walks, applied to a copy of the tree and tested."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.every import every

ROOT = Path(__file__).resolve().parents[2]
WALKS = sorted((ROOT / "benchmarks" / "walks").glob("*.patch"))
KEYS = {"Walk", "Files", "Check"}


def ran(*command: str, cwd: Path) -> str:
    """Return the output of a command; its failure fails the test."""
    found = {"PYTHONPATH": str(cwd), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=cwd, env=os.environ | found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def header(walk: Path) -> dict[str, str]:
    lines = walk.read_text().partition("diff --git ")[0].splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that git tracks, as they are now."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    for name in ran("git", "ls-files", "-z", cwd=ROOT).strip("\0").split("\0"):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)  # folders are linked into the package
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.stem)
def test_a_change_touches_few_files_and_works(walk: Path, tree: Path) -> None:
    said = header(walk)
    assert set(said) == KEYS
    touched = ran("git", "apply", "--numstat", str(walk), cwd=tree).splitlines()
    assert 0 < len(touched) <= int(said["Files"]), touched
    ran("git", "apply", str(walk), cwd=tree)
    program, *arguments = shlex.split(said["Check"])
    assert program == "python"
    ran(sys.executable, *arguments, cwd=tree)


@every("walk", WALKS)
def test_a_walk_applies_to_the_tree_as_it_is(walk: Path) -> None:
    ran("git", "apply", "--check", str(walk), cwd=ROOT)
