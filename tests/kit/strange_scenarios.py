"""Small random traces, machines and configurations for policy files: nanosecond times, ties and unequal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.platform import Link
from moereplay.traces.routers import weigh
from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, memory_trace
from tests.kit.cases import at_rate, machine, sizes
from tests.kit.scenarios import CONTRACTS, SHARES
from tests.kit.strange_files import File

ROUTER = Router(renormalise=True)
#: What stands beside the user's own policies.
BESIDE = {
    "eviction": ("lru", "fifo", "lfu", "least_stale", "arc", "sieve", "lru:touch_on_predict=true", "random"),
    "prefetch": ("none", "top_k", "top_k:factor=2", "score:percentile=30", "side_buffer:buffers=2:fetch=2",
                 "previous_token", "coactivation", "activation_matrix"),
    "miss": ("fetch", "fetch", "fetch:bits=4", "drop:keep=1", "substitute:tolerance=.5", "cpu", "split", "cascade"),
    "routing": ("standard", "standard", "cache_prior", "prune:keep=1", "swap:rank=1"),
}  # fmt: skip
SILENT = {
    "eviction": ("lru", "fifo", "lfu", "least_stale"),
    "prefetch": ("none", "top_k", "top_k:factor=2", "previous_token"),
    "miss": ("fetch",),
}
FUTURE = ("oracle", "belady")


def drawn_trace(dice: Random) -> Trace:
    """A few requests of a few tokens; logits in quarters, so that ties abound, and tokens that are not routed."""
    layers, experts = dice.randint(1, 3), dice.randint(1, 6)
    each = [dice.randint(1, 9) for _ in range(layers)] if dice.random() < 0.6 else [8] * layers
    geometry = sizes(layers, experts, dice.randint(1, min(3, experts)), each, router=ROUTER, expert_bits=8)
    rng = np.random.Generator(np.random.PCG64(dice.randrange(1 << 32)))
    lengths = [(dice.randint(0, 5), dice.randint(0, 9)) for _ in range(dice.randint(1, 3))]
    requests = [_request(rng, geometry, *pair) for pair in lengths if any(pair)] or [_request(rng, geometry, 1, 2)]
    return memory_trace(Header(geometry=geometry, lookahead_depth=2), requests)


def _request(rng: np.random.Generator, geometry: Geometry, prompt: int, decoded: int) -> Request:
    shape = (prompt + decoded, geometry.layers, geometry.experts)
    logits = rng.integers(-8, 9, shape).astype(np.float32) / 4
    chosen = np.lexsort((rng.random(shape), -logits), axis=-1)[..., : geometry.k]
    weights = weigh(ROUTER, logits, chosen)
    lost = rng.random(shape[:2]) < 0.1
    chosen[lost], weights[lost] = -1, 0
    looks = tuple(rng.integers(-8, 9, shape).astype(np.float32) / 4 for _ in range(2))
    return Request(chosen, prompt, weights, logits, looks)


def platform_file(dice: Random, path: Path) -> str:
    """Times of a few nanoseconds, as a file that `--platform` takes; a second link, and either may have no expert."""
    spent = ("dense_ns", "expert_ns", "expert_ns_per_token", "pass_ns")
    few: dict[str, Any] = {name: dice.randint(0, 7) for name in spent}
    rate, left = dice.choice((0.5, 1.0, 3.0)), dice.choice((1.0, 0.5, 0.3))
    more = [at_rate(Link(bytes_per_s=1, share=dice.choice(SHARES)), 2e9)] if dice.random() < 0.5 else []
    shared = {"share": dice.choice(SHARES), "more": more} if more else {}
    made = machine(rate, dice.randint(0, 7), dice.randint(1, 3), dice.randint(0, 7), left=left, **few, **shared)
    document = made.document()
    tables = [("[links]", row) for row in document["links"]] if more else [("link", document["link"])]
    lines = ['name = "drawn"']
    for table, figures in (*tables, *((name, document[name]) for name in ("compute", "cpu", "contention"))):
        lines += [f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in figures.items() if value is not None)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def drawn_config(dice: Random, trace: Trace, platform: str, given: Sequence[File], silent: bool) -> ReplayConfig:
    """Any configuration that has the given policies; where those are silent the others are, too."""
    geometry = trace.geometry
    beside = BESIDE | (SILENT if silent else {})
    chosen = {kind: dice.choice(texts) for kind, texts in beside.items()} | {file.kind: file.spelled for file in given}
    future = any(file.future for file in given) or any(text.split(":")[0] in FUTURE for text in chosen.values())
    if future:
        chosen["routing"] = "standard"
    experts = dice.choice((1, 2, 2, 3, 3, 4, 5, 8)) * max(geometry.expert_bytes) + dice.randint(0, 4)
    scope = dice.choice(("global", "global", "per_layer"))
    each = dice.choice((1, 1, 2, 2, 3, geometry.experts))
    return configure(
        capacity=f"{each}/layer" if scope == "per_layer" else f"{experts}B",
        scope=scope,
        platform=platform,
        contract="atomic" if silent else dice.choice(CONTRACTS),
        passes=dice.choice(("recorded", "token", "chunk:2")),
        reset=dice.choice(("never", "request", "3")),
        prefetch_at=dice.choice(("gate", "after_demand")),
        prefetch_admission=dice.choice(("evict", "evict", "free_only")),
        lookahead=dice.choice(("recorded", "recorded", "shuffled_tokens", "shuffled_experts")),
        warm=((0, 0),) if dice.random() < 0.2 and not silent else (),
        seed=dice.choice((0, 7, 2**63 - 1)),
        **chosen,
    )
