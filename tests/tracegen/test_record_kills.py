"""A recording killed -9 at random moments: resumed, it is the undisturbed one, byte for byte.

torch takes seconds to load, so one process loads it and the model, and forks a child per round: this file as a program.
The child does what `moereplay record --resume` does from there on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moereplay.tracegen import record as recording
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.decoding import Decoding
from moereplay.tracegen.record import Plan, Progress, record
from moereplay.tracegen.tokens import Work
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace, verify
from tests.kit.tiny_checkpoints import checkpoint

ROOT = Path(__file__).resolve().parents[2]
PER_ROUND = 10
PLAN = Plan(decoding=Decoding(max_new_tokens=3, temperature=1.0), seed=11)


def run(
    loaded: Loaded, out: Path, requests: int, resume: bool, progress: Callable[[Progress], None] = lambda _: None
) -> Trace:
    """Record requests of 1 to 6 tokens and 3 sampled ones."""
    draw = np.random.Generator(np.random.PCG64(2))
    work = Work(tuple(draw.integers(0, 96, 1 + at % 6).astype(np.int32) for at in range(requests)), "drawn")
    return record(loaded, work, out, PLAN, resume, progress)


def until_killed(stands: Progress) -> None:
    """A round goes no further than its requests, however late the kill comes; every second one is committed."""
    time.sleep(0.02)
    if stands.done - stands.skipped == PER_ROUND:
        signal.pause()


def serve(folder: Path, out: Path, requests: int) -> None:
    """For every line that comes in: fork, let the child record, say its pid, and how it ended."""
    loaded = load(str(folder))
    recording.SECONDS_BETWEEN_COMMITS = 0.03  # not a minute, which no test could wait for
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(loaded, out, requests, True, *([until_killed] if line == "go\n" else []))
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def committed(out: Path) -> int:
    """Requests that a reader of the unfinished trace may see."""
    group = out.with_name(f"{out.name}.partial") / "zarr.json"
    return json.loads(group.read_text())["attributes"]["committed"]["requests"] if group.exists() else 0


def wait_for_a_commit(out: Path, more_than: int) -> None:
    deadline = time.monotonic() + 60
    while committed(out) <= more_than:
        assert time.monotonic() < deadline, "nothing was committed for a minute"
        time.sleep(0.005)


@pytest.fixture
def one_thread():
    """As in the other process: sums over more threads may differ in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kills", (1, pytest.param(20, marks=pytest.mark.long)))
def test_kills_and_a_resume_give_the_undisturbed_trace(kills, tmp_path):
    folder, out, draw, kept = checkpoint(tmp_path / "tiny-olmoe"), tmp_path / "killed.zarr", random.Random(5), 0
    requests = (kills + 2) * PER_ROUND
    command = [sys.executable, __file__, str(folder), str(out), str(requests)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdin
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        for _ in range(kills):
            print("go", file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            wait_for_a_commit(out, kept)
            time.sleep(draw.uniform(0, 0.1))  # a commit and what is between two take about this long
            os.kill(child, signal.SIGKILL)
            assert int(server.stdout.readline()) == -signal.SIGKILL
            assert committed(out) >= kept
            kept = committed(out)
            assert open_trace(out.with_name(f"{out.name}.partial")).requests == kept
        assert kept < requests
        print("finish", file=server.stdin, flush=True)
        server.stdout.readline()
        assert server.stdout.readline() == "0\n"
        server.stdin.close()
    resumed, undisturbed = open_trace(out), run(load(str(folder)), tmp_path / "whole.zarr", requests, resume=False)
    verify(resumed)
    assert resumed.requests == requests
    assert resumed.digest == undisturbed.digest
    assert contents(out) == contents(tmp_path / "whole.zarr")
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-olmoe", "killed.zarr", "whole.zarr"}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
