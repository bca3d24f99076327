"""Imports, appends and merges, killed -9 at random moments: no committed row is lost or wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.combine import appended, merged
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import TraceWriter
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


#: The last step waits, so that kills come before, during and after it; reading and writing take their own time.
SCRIPT = """
import sys, time
from pathlib import Path
from moereplay.traces import growing
from moereplay.traces.combine import appended, merged
from moereplay.traces.store import open_trace
from moereplay.traces.writer import TraceWriter

growing.SHARD_TOKENS, growing.VALUES_AT_ONCE = 1, 600
extend, write = TraceWriter._extend, TraceWriter._write_attributes

def slowly(step):
    def called(*arguments):
        time.sleep(0.01)
        return step(*arguments)
    return called

TraceWriter._extend, TraceWriter._write_attributes = slowly(extend), slowly(write)
print("begun", flush=True)
verb, out, *sources = sys.argv[1:]
traces = [open_trace(source) for source in sources]
appended(out, traces) if verb == "append" else merged(out, traces, resume=True)
"""


def long_one(path: Path, seed: int) -> Trace:
    with TraceWriter.create(path, PLAIN, shard_tokens=64) as writer:
        for at in range(30):
            writer.append(ids_only(70, seed + at))
        return writer.finish()


def killed(after: float, *arguments: object) -> bool:
    """Run in a process of its own, and kill it so many seconds after it has begun. Whether that came in time."""
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after)
        process.kill()
        return process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kills", (1, pytest.param(10, marks=pytest.mark.long)))
def test_an_append_that_is_killed_leaves_the_old_trace_or_the_new(kills: int, tmp_path: Path) -> None:
    ours, more, draw = long_one(tmp_path / "ours.zarr", 0), long_one(tmp_path / "more.zarr", 50), random.Random(kills)
    whole, grown = tmp_path / "whole.zarr", tmp_path / "grown.zarr"
    for copy in (whole, grown):
        shutil.copytree(tmp_path / "ours.zarr", copy)
    new = appended(whole, [more])[0].digest
    hit = 0
    for attempt in range(10 * kills):
        if hit == kills:
            break
        hit += killed(draw.random() * 1.5 * 0.9**attempt, "append", grown, more.path)
        found = open_trace(grown)
        verify(found)
        assert found.digest in (ours.digest, new)
        if found.digest == new:
            shutil.rmtree(grown)
            shutil.copytree(tmp_path / "ours.zarr", grown)
    assert hit == kills
    assert appended(grown, [more])[0].digest == new
    verify(open_trace(grown))


@pytest.mark.slow
@pytest.mark.parametrize("kills", (1, pytest.param(10, marks=pytest.mark.long)))
def test_a_merge_that_is_killed_is_resumed(kills: int, tmp_path: Path) -> None:
    sources = [long_one(tmp_path / f"{name}.zarr", seed) for name, seed in (("a", 0), ("b", 50))]
    whole, _ = merged(tmp_path / "whole.zarr", sources)
    out, draw, kept = tmp_path / "out.zarr", random.Random(kills), 0
    for _ in range(kills):
        killed(0.2 + draw.random(), "merge", out, *(trace.path for trace in sources))
        if out.exists():
            break
        partial = out.with_name("out.zarr.partial")
        if partial.exists() and '"requests": 0' not in (partial / "zarr.json").read_text():
            now = open_trace(partial)
            verify(now)
            assert now.requests >= kept
            kept = now.requests
    done = open_trace(out) if out.exists() else merged(out, sources, resume=True)[0]
    verify(done)
    assert done.digest == whole.digest
