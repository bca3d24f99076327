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
    weights = "moereplay/tracegen/miniature/model.safetensors"  # a distribution of its own
    assert names == files - {weights, "moereplay/tracegen/miniature/pyproject.toml"}
    assert "moereplay/py.typed" in names
    assert only(built, "*.whl").stat().st_size < 5e6


def test_the_sdist_holds_what_tests_and_documents_it(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "MANIFEST.in", "docs/semantics.md", "tests/conformance/cases.json"} <= names
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")} <= names
    assert not any(".derived" in name or "__pycache__" in name for name in names)


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel."""
    folder = tmp_path_factory.mktemp("empty")
    assert ran(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    pip(folder / "bin" / "python", "install", "-c", ROOT / "constraints.txt", only(built, "*.whl"))
    return folder / "bin" / "python"


def pip(python: Path, verb: str, *arguments: object) -> None:
    done = ran(sys.executable, "-m", "pip", "--python", python, verb, "--quiet", *arguments)
    assert done.returncode == 0, done.stderr


def test_the_wheel_alone_replays_the_sample_whatever_lies_beside_it(built: Path, python: Path, tmp_path: Path) -> None:
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


def test_packages_of_other_people_are_neither_harmed_nor_harmful(python: Path, tmp_path: Path) -> None:
    """Folders here are called so too: `sweeps` is by Weights & Biases, `traces` is for unevenly spaced time series."""
    files = python.parent.parent.glob("lib/*/site-packages/moereplay-*.dist-info/RECORD")
    names = {line.split("/")[0].split(",")[0] for path in files for line in path.read_text().splitlines()}
    assert {name for name in names if not name.startswith((".", "moereplay-"))} == {"moereplay"}
    (tmp_path / "experiment.toml").write_text(
        'traces = ["miniature"]\n[base]\npasses = "token"\n[grid]\neviction = ["lru", "lfu"]\ncapacity = ["25%"]\n'
    )

    def swept(out: str) -> None:
        words = ("sweep", "run", "experiment.toml", "--workers", 2, "--out", out)
        done = ran(python.with_name("moereplay"), *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    pip(python, "install", "--no-deps", "sweeps", "traces")
    swept("beside")
    pip(python, "uninstall", "--yes", "sweeps", "traces")
    swept("without")
