"""One flipped bit in a trace or in what is derived from it: the same result, or a line that says what is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flips import ROOT


def ends(folder: Path, what: str, count: int, seed: int) -> dict[str, int]:
    """How replays ended, each after another flip."""
    command = [sys.executable, "-m", "tests.flips", str(folder), what, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found.values()) == count
    assert found.keys() <= {"same", "refused"}, done.stderr
    return found


def test_a_flip_in_derived_data_changes_no_result(tmp_path: Path) -> None:
    assert ends(tmp_path, "derived", 6, seed=1) == {"same": 6}


def test_a_flip_in_a_trace_changes_no_result_or_is_named(tmp_path: Path) -> None:
    assert "refused" in ends(tmp_path, "trace", 6, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_flip_of_200_in_derived_data_changes_a_result(tmp_path: Path) -> None:
    assert ends(tmp_path, "derived", 200, seed=2) == {"same": 200}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_flip_of_200_in_a_trace_changes_a_result(tmp_path: Path) -> None:
    assert ends(tmp_path, "trace", 200, seed=2)["refused"] > 100
