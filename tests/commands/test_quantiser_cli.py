"""`--quantiser` of live runs: what the document says of stored experts, and what is refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here
from tests.kit.installed import Installed
from tests.kit.tiny_checkpoints import checkpoint

SETTINGS = ("--window", 24, "--prompt-tokens", 8, "--limit", 1, "--capacity", "40%", "--device", "cpu")
LOW = ("--miss", "lowest_bit:bits=8/4")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("quantised") / "tiny")


@pytest.fixture
def live(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`moereplay live` on one window of a text, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("Experts that do not fit fast memory are cached there. ")
    return lambda *more: moereplay_here("live", model, "--text", tmp_path / "text.txt", *SETTINGS, *more)


def test_the_document_names_the_quantiser_and_the_bits_that_it_stores(live: Run) -> None:
    (stored,) = json.loads(live(*LOW, "--json").stdout)["stored"]
    assert (stored["bits"], stored["quantiser"]) == (4, "affine")
    assert 4 < stored["bits_per_weight"] < 8
    assert json.loads(live("--json").stdout)["stored"] == []


def test_the_summary_and_a_recording_name_it_too(live: Run, tmp_path: Path) -> None:
    ran = live(*LOW, "--record", tmp_path / "run.zarr")
    assert "experts at 4 bits: affine, " in ran.stdout
    notes = open_trace(tmp_path / "run.zarr").header.provenance.notes
    assert notes[0].endswith("experts at 8 bits by affine, 4 bits by affine")


def test_a_quantiser_that_is_not_installed_is_one_line(live: Run, installed: Installed) -> None:
    for name in ("hqq", "best"):
        refused = live("--quantiser", name)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.search(
            rf"quantiser {name} .*-quantisers: pip install .*contrib/quantisers, .*affine$", refused.stderr
        )
        assert refused.stderr.count("\n") == 1
