"""Whatever a file or an option holds: an answer or one line, soon, in little memory, and nothing half made is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sweeping import ROOT


def endings(folder: Path, *options: object) -> list[dict[str, Any]]:
    """How the cases ended."""
    command = [sys.executable, "-m", "tests.kit.fuzz", str(folder), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: list[dict[str, Any]], least: int) -> None:
    assert [ending for ending in found if ending["wrong"]] == []
    assert len(found) >= least
    assert {0, 2} <= {ending["code"] for ending in found}


@pytest.mark.slow
def test_forty_hostile_files_and_options_end_in_one_line(tmp_path: Path) -> None:
    check(endings(tmp_path / "fuzz", "--cheap", "--every", 53), 40)


@pytest.mark.longest
@pytest.mark.timeout(3600)
def test_hostile_files_and_options_of_every_verb_end_in_one_line(tmp_path: Path) -> None:
    check(endings(tmp_path / "fuzz", "--every", 3), 800)
