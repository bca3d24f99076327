"""`moereplay import` of a long recording, killed -9 ten times: no committed row is lost or wrong."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.store import open_trace, verify

ROOT = Path(__file__).resolve().parents[2]
RUNS, TOKENS = 300, 350  #: a file as long as the published collection of decode runs


def recording(folder: Path) -> Path:
    """Decode runs of gpt-oss-20b's shape: distinct experts in every row."""
    random = np.random.Generator(np.random.PCG64(8))
    first, step = (random.integers(32, size=(RUNS * TOKENS, 24, 1), dtype=np.uint8) for _ in range(2))
    ids = (first + np.arange(4, dtype=np.uint8) * (step | 1)) % 32
    probs = np.broadcast_to(np.array([0.4, 0.3, 0.2, 0.1], np.float16), ids.shape)
    np.savez(folder / "decode.npz", ids=ids, probs=probs, offsets=np.arange(RUNS + 1) * TOKENS)
    return folder / "decode.npz"


def start_import(source: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """The import as a process of its own."""
    command = [sys.executable, "-m", "moereplay", "import", str(source), "--model", "gpt-oss-20b"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "--out", str(out), *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )


def committed_rows(out: Path) -> np.ndarray:
    """The chosen experts that readers of the unfinished trace see."""
    partial = out.with_name(out.name + ".partial")
    return open_trace(partial).read("chosen") if partial.exists() else np.empty((0, 24, 4), np.int16)


def committed_tokens(out: Path) -> int:
    """What the group's attributes say while the writer is at work."""
    group = out.with_name(out.name + ".partial") / "zarr.json"
    return json.loads(group.read_text())["attributes"]["committed"]["tokens"] if group.exists() else 0


def wait_for_a_commit(out: Path, process: subprocess.Popen[bytes], more_than: int) -> None:
    """Return once the import has committed more rows, or has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and committed_tokens(out) <= more_than:
        time.sleep(0.01)


@pytest.mark.parametrize("kills", (1, pytest.param(10, marks=pytest.mark.long)))
def test_kills_lose_nothing(kills, tmp_path):
    out, seed, kept = tmp_path / "gptoss.zarr", random.Random(8), np.empty((0, 24, 4), np.int16)
    source = recording(tmp_path)
    truth = np.load(source, allow_pickle=False)["ids"]
    killed = 0
    for _ in range(kills):
        process = start_import(source, out, "--resume")
        wait_for_a_commit(out, process, len(kept))
        time.sleep(seed.random() * 0.2)
        process.kill()
        killed += process.wait() == -9
        rows = committed_rows(out)
        assert len(rows) >= len(kept)
        assert np.array_equal(rows, truth[: len(rows)])
        kept = rows
    assert start_import(source, out, "--resume").wait() == 0
    assert killed == kills
    trace = open_trace(out)
    verify(trace)
    assert np.array_equal(trace.read("chosen"), truth)
