"""Options of the command itself, and `-` for standard output."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer.completion

import moereplay as package
from moereplay.simulator.config import SEMANTICS_VERSION
from tests.kit.command import moereplay_here as moereplay
from tests.kit.evidence_folder import made


def test_the_version_is_that_of_the_package_and_of_semantics() -> None:
    ended = moereplay("--version")
    expected = f"moereplay {package.__version__}, semantics {SEMANTICS_VERSION}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, expected, "")


def test_completion_prints_a_script_for_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.completion, "_get_shell_name", lambda: "bash")
    ended = moereplay("--show-completion")
    assert ended.returncode == 0 and re.search("complete .*_moereplay_completion moereplay", ended.stdout)


def test_completion_completes_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_MOEREPLAY_COMPLETE": "complete_bash",
        "COMP_WORDS": "moereplay re",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert moereplay().stdout.split() == ["record", "replay", "recommend", "report"]


def test_a_calibrated_platform_goes_to_standard_output(tmp_path: Path) -> None:
    folder, out = made(tmp_path / "made", 0.02), tmp_path / "desk.toml"
    to_file = moereplay("calibrate", "folder", folder, "--fit", "made-tenth*", "--fit", "made-half", "--out", out)
    ended = moereplay(
        "calibrate", "folder", folder, "--fit", "made-tenth*", "--fit", "made-half", "--out", "-", cwd=tmp_path
    )
    assert (to_file.returncode, ended.returncode) == (0, 0), ended.stderr
    assert ended.stdout == out.read_text() and tomllib.loads(ended.stdout)
    assert ended.stderr.startswith("warning: ") and not (tmp_path / "-").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "x", "--out", "-", "--json"),
        ("replay", "miniature", "--out", "-"),
        ("replay", "miniature", "--events", "-"),
        ("curve", "miniature", "--out", "-"),
    ],
)
def test_what_is_not_one_text_is_not_written_to_standard_output(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = moereplay(*words, cwd=tmp_path)
    assert ended.returncode == 2 and "standard output" in ended.stderr and not (tmp_path / "-").exists()
