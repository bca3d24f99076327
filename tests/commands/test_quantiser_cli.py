"""`--quantiser` of live runs: what the document says of stored experts, and what is refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here
from tests.kit.recordings import ROOT
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


@pytest.mark.skipif(not find_spec("hqq"), reason="hqq is not installed")
def test_the_best_by_width_is_named_with_its_version_and_another_run_finds_what_it_packed(
    live: Run, tmp_path: Path
) -> None:
    first, second = (json.loads(live(*LOW, "--quantiser", "best", "--json").stdout) for _ in range(2))
    assert first["stored"][0]["quantiser"].startswith("hqq 0.")
    assert first == second
    assert list((tmp_path / "cache" / "moereplay" / "packed-experts").rglob("*.packed"))


def test_a_quantiser_without_its_library_is_one_line(live: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereplay.tracegen.precision.find_spec", lambda library: None)
    for name in ("hqq", "best"):
        refused = live("--quantiser", name)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.search(rf"quantiser {name} .*hqq: pip install -e .*\[quant\]', .*affine$", refused.stderr)
        assert refused.stderr.count("\n") == 1


@pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
def test_a_width_that_it_lacks_is_one_line(live: Run) -> None:
    refused = live("--miss", "lowest_bit:bits=8/3", "--quantiser", "bitsandbytes")
    assert refused.returncode == 2
    assert "quantiser bitsandbytes has 8, 4 bits, not 3; take affine" in refused.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
def test_nothing_that_a_library_says_of_itself_is_seen() -> None:
    command = [sys.executable, "-m", "moereplay", "live", "miniature", "--limit", "1", "--max-new-tokens", "2"]
    command += [*LOW, "--quantiser", "torchao"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert [line.partition(" ")[0] for line in ran.stderr.splitlines()] == ["loading", "ran"]
