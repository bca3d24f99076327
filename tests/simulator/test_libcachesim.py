"""Miss for miss the same as libCacheSim (github.com/1a1a11a/libCacheSim), the simulator of another group.

Contract sequential without prefetch is a classical cache over the flattened stream of demands, one expert at a time.
An expert weighs one byte, as objects do there: ARC's target, a float in bytes, then rounds alike. Belady's ties are
among experts that never return, so they cannot show in hits.

Where definitions differ there, we have a parameter: its S3-FIFO and its SLRU (always four equal segments) fill other
queues than their papers do until the cache is full (`fill=`), its LRU-K forgets what left (`history=resident`). Its
segments are floor(capacity / 4) each and the rest is nobody's, so capacities here are multiples of four; its S3-FIFO
wants room for two in the small queue, so small pools give it a quarter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from moereplay.traces.store import open_trace
from tests.kit.exporting import exported
from tests.kit.policy_runs import Access, Outcome, replayed, replayed_by_compiled
from tests.kit.recordings import FOLDER, needs_recording

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim has no wheel for this machine")

on_recordings = needs_recording("gpt-oss-20b", "qwen3-30b-a3b", claim="libcachesim")

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"
GPT_OSS = "gpt-oss-20b/gptoss20b_decode.npz"
NEVER = 2**63 - 1
Theirs = dict[str, tuple[str, dict[str, float]]]  # our spelling -> their name and options
PLAIN: Theirs = {
    "lru": ("LRU", {}),
    "fifo": ("FIFO", {}),
    "lfu": ("LFU", {}),
    "arc": ("ARC", {}),
    "sieve": ("Sieve", {}),
    "belady": ("Belady", {}),
}
HASTY = {"small_size_ratio": 0.25, "ghost_size_ratio": 0.5, "move_to_main_threshold": 1}
TUNED: Theirs = {
    "clock": ("Clock", {}),
    "clock:bits=2": ("Clock", {"n_bit_counter": 2}),
    "slru:segments=4:protected=.75:fill=lowest": ("SLRU", {}),
    "s3fifo:small=.25:fill=main": ("S3FIFO", {"small_size_ratio": 0.25}),
    "s3fifo:small=.25:ghost=.5:threshold=1:fill=main": ("S3FIFO", HASTY),
    "lru_k:history=resident": ("LRUK", {}),
    "lru_k:k=3:history=resident:among=fifo": ("LRUK", {"k": 3}),
}
LARGE_ONLY: Theirs = {"s3fifo:fill=main": ("S3FIFO", {})}
SMALL_TABLE = 10  # log2 of the first size of its hash table; the default takes 128 MiB per cache
#: A quarter, half and three quarters of gpt-oss's 32 and of Qwen3's 128 experts per layer.
GPT_OSS_SLOTS, QWEN_SLOTS = (8, 16, 24), (32, 64, 96)
#: The first of them; the others are left to `make test-long`.
GPT_OSS_FIRST, QWEN_FIRST = (
    [slots[0], *(pytest.param(each, marks=pytest.mark.longest) for each in slots[1:])]
    for slots in (GPT_OSS_SLOTS, QWEN_SLOTS)
)
QWEN_OTHERS = ("general", "math", "medical")  #: domains that are left to `make test-long`


def part(request: Request, tokens: int, every: int) -> Request:
    weights = None if request.weights is None else request.weights[:tokens, ::every]
    return Request(request.chosen[:tokens, ::every], min(request.prompt_length, tokens), weights)


@cache
def stream_of(file: str, requests: int, tokens: int, every: int) -> Trace:
    """The first tokens of the first requests of a file, of layers 0, `every`, 2 * `every`, ..."""
    foreign = importers.read(FOLDER / file, Options(expert_bytes=1))
    taken = [part(request, tokens, every) for request in islice(foreign.requests, requests)]
    layers = taken[0].chosen.shape[1]
    smaller = foreign.header.geometry.model_copy(update={"layers": layers, "expert_bytes": (1,) * layers})
    return memory_trace(foreign.header.model_copy(update={"geometry": smaller}), taken)


@cache
def bundled() -> Trace:
    """The first two requests of the bundled sample, 161 tokens, in layers 0, 6 and 12: 3,864 accesses."""
    sample = open_trace(SAMPLE)
    taken = [part(sample.request(number), 128, 6) for number in range(2)]
    smaller = sample.geometry.model_copy(update={"layers": 3, "expert_bytes": (1,) * 3})
    return memory_trace(Header(geometry=smaller), taken)


def next_uses(stream: Sequence[int]) -> list[int]:
    """Position of each access's next one, as libCacheSim's oracle format has it."""
    seen: dict[int, int] = {}
    following = [NEVER] * len(stream)
    for at in range(len(stream) - 1, -1, -1):
        following[at] = seen.get(stream[at], NEVER)
        seen[stream[at]] = at
    return following


def their_hits(policy: str, stream: Sequence[int], slots: int) -> list[bool]:
    name, options = (PLAIN | TUNED | LARGE_ONLY)[policy]
    theirs = getattr(libcachesim, name)(cache_size=slots, hashpower=SMALL_TABLE, **options)
    requests = zip(stream, next_uses(stream), strict=True)
    return [theirs.get(libcachesim.Request(obj_size=1, obj_id=x, next_access_vtime=then)) for x, then in requests]


def our_accesses(
    policy: str, trace: Trace, slots: int, scope: str, run: Callable[..., Outcome] = replayed_by_compiled
) -> list[Access]:
    return run(trace, slots, eviction=policy, scope=scope, contract="sequential", passes="token").accesses


def assert_same_misses(policy: str, accesses: Sequence[Access], slots: int, geometry: Geometry) -> None:
    """One pool: every access agrees."""
    stream = [access.layer * geometry.experts + access.expert for access in accesses]
    ours = [access.hit for access in accesses]
    assert ours == their_hits(policy, stream, slots)
    assert 0 < sum(ours) < len(ours)


def assert_same_per_layer(policy: str, trace: Trace, slots: int, run: Callable[..., Outcome] = replayed_by_compiled):
    accesses = our_accesses(policy, trace, slots, "per_layer", run)
    for layer in range(trace.geometry.layers):
        assert_same_misses(policy, [access for access in accesses if access.layer == layer], slots, trace.geometry)


@pytest.mark.parametrize("policy", [*PLAIN, *(pytest.param(each, marks=pytest.mark.long) for each in TUNED)])
def test_the_bundled_sample_with_a_cache_per_layer(policy: str):
    """A pool of 32, half of the experts; both engines."""
    assert_same_per_layer(policy, bundled(), 32, replayed)


@on_recordings
@pytest.mark.parametrize("slots", GPT_OSS_FIRST)
@pytest.mark.parametrize("policy", PLAIN)
def test_gpt_oss_with_a_cache_per_layer(policy: str, slots: int):
    """The first two decoded runs, 511 and 101 tokens, in layers 0, 8 and 16: 7,344 accesses."""
    assert_same_per_layer(policy, stream_of(GPT_OSS, 2, 512, 8), slots)


@pytest.mark.long
@on_recordings
@pytest.mark.parametrize("slots", GPT_OSS_SLOTS)
@pytest.mark.parametrize("policy", PLAIN)
def test_gpt_oss_with_one_cache_for_all_layers(policy: str, slots: int):
    """Slots of 24 layers in one pool, 32 tokens of three runs: 9,216 accesses."""
    trace = stream_of(GPT_OSS, 3, 32, 1)
    accesses = our_accesses(policy, trace, 24 * slots, "global")
    assert_same_misses(policy, accesses, 24 * slots, trace.geometry)


@pytest.mark.long
@on_recordings
@pytest.mark.parametrize("slots", (GPT_OSS_SLOTS[0], GPT_OSS_SLOTS[2]))
@pytest.mark.parametrize("policy", TUNED)
def test_tuned_policies_on_gpt_oss_with_a_cache_per_layer(policy: str, slots: int):
    """As above; pools of 8 and 24."""
    assert_same_per_layer(policy, stream_of(GPT_OSS, 2, 512, 8), slots)


@pytest.mark.long
@on_recordings
@pytest.mark.parametrize("policy", TUNED | LARGE_ONLY)
def test_tuned_policies_on_gpt_oss_with_one_cache_for_all_layers(policy: str):
    """A pool of 192, where S3-FIFO's own tenth has room for 19."""
    trace = stream_of(GPT_OSS, 3, 32, 1)
    assert_same_misses(policy, our_accesses(policy, trace, 192, "global"), 192, trace.geometry)


@on_recordings
@pytest.mark.parametrize(
    ("domain", "slots"),
    [
        ("code", 32),
        pytest.param("math", 64, marks=pytest.mark.long),
        pytest.param("medical", 96, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("policy", TUNED)
def test_tuned_policies_on_qwen3(policy: str, domain: str, slots: int):
    """The first 512 tokens in layer 0: 4,096 accesses."""
    assert_same_per_layer(policy, stream_of(f"qwen3-30b-a3b/{domain}.npz", 1, 512, 48), slots)


@on_recordings
@pytest.mark.parametrize("domain", ["code", *(pytest.param(each, marks=pytest.mark.longest) for each in QWEN_OTHERS)])
@pytest.mark.parametrize("slots", QWEN_FIRST)
@pytest.mark.parametrize("policy", PLAIN)
def test_qwen3_with_a_cache_per_layer(policy: str, slots: int, domain: str):
    """The first 512 tokens of each domain in layer 0: 4,096 accesses."""
    assert_same_per_layer(policy, stream_of(f"qwen3-30b-a3b/{domain}.npz", 1, 512, 48), slots)


# -- files of `export --format oracle-general`: libCacheSim reads them, and counts the misses of our replays -----------

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
