"""What strangers install: a wheel and an sdist of this tree, and a replay by the wheel in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace
from tests.kit.recordings import ROOT
from tests.project.test_imports import PACKAGES

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"
UNWANTED = (".*", "runs", "build", "dist", "*.egg-info", "*.derived", "__pycache__")
#: Names that a user may have in the folder where the program runs.
THEIRS = ("traces.py", "simulator.py", "policies/__init__.py", "results/__init__.py")


def ran(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A process of its own, outside of the tree."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both distributions."""
    folder = tmp_path_factory.mktemp("dist")
    unwanted = shutil.ignore_patterns(*UNWANTED)
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=unwanted)  # it is written to
    done = ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def is_shipped(path: Path) -> bool:
    """Whether a file of the tree belongs to a package, and was not made by running it."""
    return path.is_file() and path.suffix != ".pyc" and not any(part.endswith(".derived") for part in path.parts)


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(built: Path) -> None:
    names = {name for name in zipfile.ZipFile(only(built, "*.whl")).namelist() if ".dist-info/" not in name}
    places = {package: f"moereplay/{package}" for package in PACKAGES} | {"moereplay": "moereplay"}
    files = {
        f"{inside}/{path.relative_to(ROOT / package).as_posix()}"
        for package, inside in places.items()
        for path in (ROOT / package).rglob("*")
        if is_shipped(path)
    }
    assert names == files
    assert "moereplay/py.typed" in names


def test_the_sdist_holds_what_tests_and_documents_it(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "MANIFEST.in", "docs/semantics.md", "tests/conformance/cases.json"} <= names
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")} <= names
    assert not any(".derived" in name or "__pycache__" in name for name in names)


def test_the_wheel_alone_replays_the_sample_whatever_lies_beside_it(built: Path, tmp_path: Path) -> None:
    python = tmp_path / "empty" / "bin" / "python"
    assert ran(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty").returncode == 0
    install = ("-m", "pip", "--python", python, "install", "--quiet", "-c", ROOT / "constraints.txt")
    installed = ran(sys.executable, *install, only(built, "*.whl"))
    assert installed.returncode == 0, installed.stderr
    for name in THEIRS:
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('a file of the user was imported')\n")

    def moereplay(*arguments: object) -> subprocess.CompletedProcess[str]:
        return ran(python.with_name("moereplay"), *arguments, cwd=tmp_path / "theirs")

    shown = moereplay("replay", "miniature", "--capacity", "25%", "--prefetch", "top_k", "--json", "--out", "results")
    assert shown.returncode == 0, shown.stderr
    here = replay(open_trace(SAMPLE), configure(capacity="25%", prefetch="top_k"))
    assert json.loads(shown.stdout)["totals"] == json.loads(json.dumps(here.to_json()["totals"]))
    assert len([*(tmp_path / "theirs" / "results").glob("part-*")]) == 1
    workers = moereplay("replay", "miniature", "--engine", "reference", "--eviction", "lru,fifo", "--workers", 2)
    assert workers.returncode == 0, workers.stderr
    without_torch = moereplay("record", "miniature", "--text", "a.txt", "--out", "a.zarr")
    assert (without_torch.returncode, "pip install 'torch>=" in without_torch.stderr) == (2, True)
