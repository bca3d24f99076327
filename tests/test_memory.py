"""A replay maps its arrays and copies none: it needs little beside what it reads, and less than all of that at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from traces.schema import Geometry
from traces.synthetic import Synthetic, synthesise
from traces.writer import write_trace

ROOT = Path(__file__).resolve().parents[1]
GEOMETRY = Geometry(layers=8, experts=64, k=4, expert_bytes=(1_000_000,) * 8)
LARGE, SMALL = 6_000, 40  # tokens
ROOM = 4 * 2**20
#: A replay of the small trace loads all code first. `room` is what the large one may allocate beside that; mapped files
#: do not count there, as the system can drop their pages at any time.
SCRIPT = """
import json, resource, sys
from pathlib import Path
from simulator.compiled.feed import feed_of
from simulator.config import KINDS, configure
from simulator.replay import replay
from traces.store import open_trace

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
except MemoryError:
    held = None
chosen = config.policy_set()
needs = frozenset().union(*(getattr(chosen, kind).needs for kind in KINDS))
read = sum(array.nbytes for array in feed_of(large, config, needs, chosen.reads).values())
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


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_replay_needs_at_most_twice_what_it_reads(traces: tuple[Path, Path], settings: dict[str, str]) -> None:
    found = measured(*traces, settings)
    assert found["accesses"] == LARGE * GEOMETRY.layers * GEOMETRY.k
    assert found["grown"] <= 2 * found["read"]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_trace_larger_than_memory_is_replayed(traces: tuple[Path, Path], settings: dict[str, str]) -> None:
    """With room for less than the arrays that it reads; reading the trace in one piece does not fit there either."""
    found = measured(*traces, settings, room=ROOM)
    assert found["accesses"] == LARGE * GEOMETRY.layers * GEOMETRY.k
    assert found["read"] > 2 * ROOM
    assert not found["held"]
