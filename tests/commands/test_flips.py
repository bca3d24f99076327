"""One flipped bit in a trace or in what is derived from it: the same result, or a line that says what is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.flips import ROOT


def check(folder: Path, count: int, seed: int) -> None:
    """Replays after so many flips in a trace, and as many in derived data, each with another bit."""
    command = [sys.executable, "-m", "tests.kit.flips", str(folder), str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["derived"] == {"same": count}, done.stderr
    assert found["trace"].keys() <= {"same", "refused"}, done.stderr
    assert found["trace"]["refused"] > count / 2


@pytest.mark.slow
def test_a_flipped_bit_changes_no_result_or_is_named(tmp_path: Path) -> None:
    check(tmp_path, 6, seed=1)


@pytest.mark.longest
@pytest.mark.timeout(1800)
def test_no_flip_of_200_changes_a_result(tmp_path: Path) -> None:
    check(tmp_path, 200, seed=2)
