"""Files of a repository's host: workflows call targets of the Makefile; the action's step replays and judges."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.every import every
from tests.kit.recordings import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"(?m)^([a-z%-]+):", (ROOT / "Makefile").read_text("utf-8")))
#: Files that state the version which pyproject.toml has.
STATED = {
    "CITATION.cff": r"(?m)^version: (.+)$",
    "docs/recipes/researcher.md": r"version = \{(.+)\}|moereplay (\d\S+), semantics",
    "docs/recording.md": r"dist/moereplay-(.+?)-py3",
    "CHANGELOG.md": r"(?m)\A# Changelog\n\n## (\S+)",
}


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text("utf-8"))


@every("path", WORKFLOWS)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    for job in read(path)["jobs"].values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        named = [command.split()[1] for command in commands]
        wanted = job["strategy"]["matrix"]["target"] if '"$TARGET"' in named else named
        assert commands and all(command.startswith("make ") for command in commands)
        assert set(wanted) <= TARGETS


@every("path", [*WORKFLOWS, ROOT / "action.yml"])
def test_an_action_of_others_is_named_by_its_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text("utf-8"))
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) for name in used)


@every("file", sorted(STATED))
def test_the_version_is_that_of_the_package(file: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    found = re.findall(STATED[file], (ROOT / file).read_text("utf-8"))
    assert found and {"".join(each) for each in found} == {version}


def acted(tmp_path: Path, **given: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the action's step as a host does, with this environment as the installed one, and return what it put out."""
    tools = tmp_path / "moereplay" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "moereplay"):
        (tools / name).write_text(
            f'#!/bin/sh\nexec {sys.executable} {"" if name == "python" else "-m moereplay"} "$@"\n'
        )
        (tools / name).chmod(0o755)
    action = read(ROOT / "action.yml")
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()} | given
    (step,) = [each for each in action["runs"]["steps"] if each["id"] == "replay"]
    places = {"RUNNER_TEMP": tmp_path, "GITHUB_OUTPUT": tmp_path / "out", "GITHUB_STEP_SUMMARY": tmp_path / "summary"}
    named = {name: re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text) for name, text in step["env"].items()}
    values = {name: inputs[found[1]] for name, found in named.items() if found}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(path) for name, path in places.items()} | values
    (tmp_path / "step.sh").write_text(step["run"])
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(tmp_path / "step.sh")]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, "".join(path.read_text() for path in (tmp_path / "out", tmp_path / "summary") if path.exists())


@pytest.mark.slow
def test_the_action_judges_a_hit_rate(tmp_path: Path) -> None:
    given = {"trace": "miniature", "arguments": "--capacity 25% --passes token --eviction lru"}
    done, shown = acted(tmp_path / "a", **given, **{"least-hit-rate": "0.4"})
    assert done.returncode == 0, done.stderr
    rate = float(re.findall(r"hit-rate=(.+)", shown)[0])
    assert 0.4 < rate < 1 and f"SIMULATED: {rate:.2%} hits of " in shown
    done, shown = acted(tmp_path / "b", **given, **{"least-hit-rate": "0.9"})
    assert done.returncode == 1 and f"hit rate {rate:.4f} is below 0.9" in done.stderr and str(rate) in shown


@pytest.mark.slow
def test_the_action_takes_a_policy_file(tmp_path: Path) -> None:
    text = (ROOT / "policies" / "eviction" / "fifo.py").read_text("utf-8")
    (tmp_path / "mine.py").write_text(text.replace('"fifo"', '"mine"'))
    done, shown = acted(
        tmp_path, trace="miniature", arguments="--eviction mine", **{"policy-file": str(tmp_path / "mine.py")}
    )
    assert done.returncode == 0 and "hit-rate=" in shown, done.stderr


def test_the_action_refuses_what_it_cannot_replay(tmp_path: Path) -> None:
    done, shown = acted(tmp_path, trace="no-such-trace")
    assert done.returncode == 2 and "no-such-trace" in done.stderr and not shown
