"""Recordings of other people need not be there: the end of a run says what that leaves unchecked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.recordings import CLAIMS, ROOT


def test_what_rests_on_recordings_is_said_among_the_evidence() -> None:
    evidence = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    assert [text for text in CLAIMS.values() if text not in evidence] == []


@pytest.mark.slow
def test_without_the_recordings_a_run_names_what_it_left_unchecked(tmp_path: Path) -> None:
    """One of the tests of that name needs a recording."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/traces/test_geometry.py", "-k", "gemma"]
    environment = os.environ | {"MOEREPLAY_RECORDINGS": str(tmp_path / "none")}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    at = lines.index("Of docs/evidence.md they leave unchecked:")
    assert lines[at + 1] == f"    1 tests: {CLAIMS['geometry']}"
    assert lines[at - 1].startswith(f"1 skipped tests need other people's recordings, which {tmp_path / 'none'} ")
    assert " 1 skipped" in lines[-1]
