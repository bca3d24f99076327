"""Files of `export --format oracle-general`: libCacheSim reads them, and counts the misses of our replays."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Trace, memory_trace
from moereplay.traces.store import open_trace
from tests.kit.exporting import exported
from tests.kit.recordings import FOLDER, ROOT, needs_recording

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim has no wheel for this machine")

SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"
SMALL_TABLE = 10
THEIRS = {"lru": "LRU", "belady": "Belady"}


def their_misses(file: Path, policy: str, capacity: int) -> tuple[int, int]:
    """Misses and accesses of the file."""
    reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    cache = getattr(libcachesim, THEIRS[policy])(cache_size=capacity, hashpower=SMALL_TABLE)
    hits = [cache.get(request) for request in reader]
    return hits.count(False), len(hits)


def our_misses(trace: Trace, policy: str, experts: int) -> tuple[int, int]:
    settings = {"contract": "sequential", "passes": "token", "eviction": policy, "capacity": f"{experts}experts"}
    totals = replay(trace, configure(**settings)).totals
    return totals["misses"], totals["accesses"]


def agree(trace: Trace, policy: str, experts: int, folder: Path) -> None:
    file, _ = exported(trace, "oracle-general", folder, passes="token")
    ours = our_misses(trace, policy, experts)
    assert their_misses(file, policy, experts * trace.geometry.expert_bytes[0]) == ours
    assert 0 < ours[0] < ours[1]


@pytest.mark.parametrize(("policy", "experts"), [("lru", 250), ("lru", 500), ("belady", 250)])
def test_the_miniature(policy: str, experts: int, tmp_path: Path) -> None:
    """All 63,104 accesses, in a quarter and half of the 1,024 experts."""
    agree(open_trace(SAMPLE), policy, experts, tmp_path)


@needs_recording("gpt-oss-20b", claim="libcachesim")
@pytest.mark.parametrize(("policy", "experts"), [("lru", 200), ("belady", 200)])
def test_a_part_of_gpt_oss(policy: str, experts: int, tmp_path: Path) -> None:
    """The first run that was decoded: 511 tokens of 24 layers, 4 of 32 experts."""
    foreign = importers.read(FOLDER / "gpt-oss-20b/gptoss20b_decode.npz", Options(expert_bytes=1000))
    agree(memory_trace(foreign.header, list(islice(foreign.requests, 1))), policy, experts, tmp_path)
