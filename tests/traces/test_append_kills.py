"""`traces append` and `traces merge`, killed -9 at random moments: the old trace is there whole, or the new one is."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moereplay.traces.combine import appended, merged
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import TraceWriter
from tests.kit.stored import PLAIN, ids_only

ROOT = Path(__file__).resolve().parents[2]
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
