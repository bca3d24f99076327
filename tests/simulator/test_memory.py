"""A replay maps its arrays and copies none: it needs little beside what it reads, and less than all of that at once.

What it maps was derived from the trace a block at a time, in memory that does not grow with the trace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moereplay.traces.schema import Geometry, Header, Request
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import TraceWriter, write_trace

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = Geometry(layers=8, experts=64, k=4, expert_bytes=(1_000_000,) * 8)
LARGE, SMALL = 7_000, 40  # tokens
ROOM = 4 * 2**20
#: A replay of the small trace loads all code first. `room` is what the large one may allocate beside that; mapped files
#: do not count there, as the system can drop their pages at any time.
SCRIPT = """
import json, resource, sys, threading
from pathlib import Path
import zarr  # its libraries are mapped before the room is made small
threading.stack_size(2**20)  # the thread of a replay counts within the room, and would take all of it
from moereplay.simulator.compiled.inputs import inputs_of
from moereplay.simulator.config import KINDS, configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

large, small = (open_trace(Path(name)) for name in sys.argv[1:3])
config, room = configure(**json.loads(sys.argv[3])), int(sys.argv[4])
replay(small, config)
if room:
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + room,) * 2)
Path("/proc/self/clear_refs").write_text("5")  # the peak of loading machine code is forgotten
before = status("VmRSS")
totals = replay(large, config).totals
after = status("VmHWM")
try:
    held = [large.read(name) for name in ("logits", "chosen", "weights")]
except TraceError as refused:
    assert "do not fit in memory" in str(refused), refused
    held = None
chosen = config.policy_set()
needs = frozenset().union(*(getattr(chosen, kind).needs for kind in KINDS))
read = sum(array.nbytes for array in inputs_of(large, config, needs, chosen.reads).values())
print(json.dumps({"grown": after - before, "read": read, "accesses": totals["accesses"], "held": held is not None}))
"""
SETTINGS = ({"prefetch": "none"}, {"prefetch": "top_k"}, {"routing": "cache_prior"})


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large and a small trace with everything that policies may need, and what is derived from them."""
    paths = [tmp_path_factory.mktemp("memory") / name for name in ("large.zarr", "small.zarr")]
    for path, tokens in zip(paths, (LARGE, SMALL), strict=True):
        drawn = Synthetic(geometry=GEOMETRY, requests=4, prompt_tokens=0, decode_tokens=tokens // 4, recall=(0.8,))
        made = synthesise(drawn)
        write_trace(path, made.header, map(made.request, range(made.requests)), made.router_bias)
    for settings in SETTINGS:
        measured(paths[0], paths[1], settings)
    return paths[0], paths[1]


def measured(large: Path, small: Path, settings: dict[str, str], room: int = 0) -> dict[str, int]:
    """A process of its own: what it needed for the large trace beside what the small one did."""
    arguments = [str(large), str(small), json.dumps({"capacity": "25%"} | settings), str(room)]
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "POLARS_MAX_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_replay_needs_at_most_twice_what_it_reads(traces: tuple[Path, Path], settings: dict[str, str]) -> None:
    found = measured(*traces, settings)
    assert found["accesses"] == LARGE * GEOMETRY.layers * GEOMETRY.k
    assert found["grown"] <= 2 * found["read"]


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_trace_larger_than_memory_is_replayed(traces: tuple[Path, Path], settings: dict[str, str]) -> None:
    """With room for less than the arrays that it reads; reading the trace in one piece does not fit there either."""
    found = measured(*traces, settings, room=ROOM)
    assert found["accesses"] == LARGE * GEOMETRY.layers * GEOMETRY.k
    assert found["read"] > 2 * ROOM
    assert not found["held"]


#: Blocks of `values` values; what a first, small trace needs once is not counted, and neither are pages of files.
DERIVING = """
import json, sys, threading, time
from pathlib import Path
from moereplay.traces import demand, growing, token_arrays
from moereplay.traces.store import open_trace

growing.VALUES_AT_ONCE = demand.VALUES_AT_ONCE = int(sys.argv[3])

def derive(name):
    trace = open_trace(Path(name))
    parts = [*vars(demand.demand_of(trace, "token")).values(), demand.next_passes(trace, "token")]
    parts += [token_arrays.rows(trace, name) for name in ("chosen", "weights")]
    return sum(part.nbytes for part in parts)

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

derive(sys.argv[2])
before = peak = anonymous()

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
derived = derive(sys.argv[1])
print(json.dumps({"grown": peak - before, "derived": derived}))
"""


def routed(path: Path, tokens: int, layers: int, requests: int) -> Path:
    """A trace of 8 of 64 experts with weights, in little memory."""
    geometry = Geometry(layers=layers, experts=64, k=8, expert_bytes=(1_000_000,) * layers)
    rng = np.random.Generator(np.random.PCG64(0))
    with TraceWriter.create(path, Header(geometry=geometry)) as writer:
        for _ in range(requests):
            starts = rng.integers(0, 64, (tokens // requests, layers, 1))
            chosen = ((starts + 7 * np.arange(8)) % 64).astype(np.int16)
            writer.append(Request(chosen, 0, weights=rng.random(chosen.shape, np.float32)))
            writer.commit()
        writer.finish()
    return path


def deriving(folder: Path, tokens: int, layers: int, values: int) -> dict[str, int]:
    """Return the memory that a separate process needed to derive the demand of one-token passes."""
    paths = [routed(folder / "large.zarr", tokens, layers, 10), routed(folder / "small.zarr", 40, layers, 1)]
    command = [sys.executable, "-W", "error", "-c", DERIVING, *map(str, paths), str(values)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_what_is_derived_may_be_larger_than_memory(tmp_path: Path) -> None:
    """With blocks of a hundredth of the trace."""
    found = deriving(tmp_path, tokens=25_000, layers=4, values=8_000)
    assert found["derived"] == 25_000 * 4 * (8 * (2 + 2 + 8 + 8 + 4 + 8 + 8 + 2 + 4) + 8) + 8 + 4 * 64 * 8
    assert found["grown"] < found["derived"] / 2


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_000_tokens_of_16_layers_derive_in_less_than_500_mb(tmp_path: Path) -> None:
    found = deriving(tmp_path, tokens=200_000, layers=16, values=1 << 20)
    assert found["derived"] > 1 << 30
    assert found["grown"] < 500 * 2**20
