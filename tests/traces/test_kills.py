"""Imports, appends and merges, killed -9 at random moments: no committed row is lost or wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moereplay.traces import growing
from moereplay.traces.combine import appended, content_digest, merged
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.kills import killed_at
from tests.kit.stored import PLAIN, ids_only

ROOT = Path(__file__).resolve().parents[2]
RUNS, TOKENS = 150, 350  #: a file half as long as the published collection of decode runs
FEW_RUNS = 40  #: which take a second to store: enough for one kill


def recording(folder: Path, runs: int) -> Path:
    """Decode runs of gpt-oss-20b's shape: distinct experts in every row."""
    random = np.random.Generator(np.random.PCG64(8))
    first, step = (random.integers(32, size=(runs * TOKENS, 24, 1), dtype=np.uint8) for _ in range(2))
    ids = (first + np.arange(4, dtype=np.uint8) * (step | 1)) % 32
    probs = np.broadcast_to(np.array([0.4, 0.3, 0.2, 0.1], np.float16), ids.shape)
    np.savez(folder / "decode.npz", ids=ids, probs=probs, offsets=np.arange(runs + 1) * TOKENS)
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
    """Return the committed tokens from the group's attributes during writing."""
    group = out.with_name(out.name + ".partial") / "zarr.json"
    return json.loads(group.read_text())["attributes"]["committed"]["tokens"] if group.exists() else 0


def wait_for_a_commit(out: Path, process: subprocess.Popen[bytes], more_than: int) -> None:
    """Return once the import has committed more rows, or has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline and committed_tokens(out) <= more_than:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kills", (1, pytest.param(10, marks=pytest.mark.long)))
def test_kills_lose_nothing(kills, tmp_path):
    out, seed, kept = tmp_path / "gptoss.zarr", random.Random(8), np.empty((0, 24, 4), np.int16)
    source = recording(tmp_path, FEW_RUNS if kills == 1 else RUNS)
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


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """Two traces, which are copied in pieces of some rows."""
    monkeypatch.setattr(growing, "SHARD_TOKENS", 1)
    monkeypatch.setattr(growing, "VALUES_AT_ONCE", 600)
    requests = {name: [ids_only(70, seed + at) for at in range(8)] for name, seed in (("a", 0), ("b", 50))}
    return [write_trace(tmp_path / f"{name}.zarr", PLAIN, rows) for name, rows in requests.items()]


@pytest.mark.slow
def test_an_append_that_is_killed_leaves_the_old_trace_or_the_new(sources: list[Trace], tmp_path: Path) -> None:
    ours, more = sources
    whole, grown = tmp_path / "whole.zarr", tmp_path / "grown.zarr"
    for copy in (whole, grown):
        shutil.copytree(ours.path or "", copy)
    new, step = appended(whole, [more])[0].digest, 0
    while killed_at(step, tmp_path, lambda: appended(grown, [more])):
        found = open_trace(grown)
        verify(found)
        assert found.digest == ours.digest
        step += 2
    verify(open_trace(grown))
    assert open_trace(grown).digest == new and step > 20


@pytest.mark.slow
def test_a_merge_that_is_killed_is_resumed(
    sources: list[Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceWriter, "create", partial(TraceWriter.create, shard_tokens=64))
    whole, (out, kept, step) = merged(tmp_path / "whole.zarr", sources)[0], (tmp_path / "out.zarr", 0, 0)
    while killed_at(step, tmp_path, lambda: merged(out, sources, resume=True)):
        before, kept = kept, committed_tokens(out)
        assert before <= kept
        if kept:
            verify(open_trace(tmp_path / "out.zarr.partial"))
        step += 3
    verify(open_trace(out))
    assert content_digest(open_trace(out)) == content_digest(whole) and kept > 70
