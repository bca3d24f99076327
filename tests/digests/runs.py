"""Which replays have a digest, and how it is made: every policy alone, under both contracts, in one pool and in one
per layer, on a recording and on two small traces.

A digest covers the counters that existed when it was made, by name, so a new counter changes none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay import policies
from moereplay.policies.contract import PolicyError
from moereplay.results.result import Result, Row
from moereplay.simulator.config import KINDS, ReplayConfig, configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, canonical, memory_trace
from moereplay.traces.store import open_trace

HERE = Path(__file__).resolve().parent
SAMPLE = HERE.parents[1] / "traces" / "samples" / "miniature.zarr"
DIGITS = 16
CONTRACTS = ("atomic", "sequential")
SCOPES = ("global", "per_layer")
#: Rows of requests and of (layer, phase) have these beside the counters.
REQUEST_TIMES = ("request", "start_ns", "ttft_ns", "decode_ns", "decode_passes", "end_ns", "tokens")
OF_LAYER = ("layer", "phase", "lifetime")
#: Capabilities whose values come from `exp`, which numpy rounds differently on different processors.
BY_EXP = frozenset({"logits", "lookahead"})


class Replay(NamedTuple):
    """A configuration of one of the traces."""

    trace: str
    policies: str  #: what is not the default: `kind policy`, or two of them
    config: ReplayConfig

    @property
    def name(self) -> str:
        """Its key in digests.json."""
        return f"{self.trace} {self.policies} {self.config.contract} {self.config.scope}"

    @property
    def by_exp(self) -> bool:
        """Return True if the digest may differ on a processor with another `exp`."""
        chosen = self.config.policy_set()
        needs = frozenset().union(*(getattr(chosen, kind).needs for kind in KINDS))
        return bool(needs & BY_EXP) or chosen.changes_routing or chosen.miss.policy.changes_output


def replays() -> Iterator[Replay]:
    """All of them, in the order of digests.json."""
    for trace, settings in SETTINGS.items():
        for title, chosen in _policy_sets():
            for contract in CONTRACTS:
                for scope in SCOPES:
                    config = configure(contract=contract, scope=scope, **settings, **chosen)
                    yield Replay(trace, title, config)


def _policy_sets() -> Iterator[tuple[str, dict[str, str]]]:
    """Every policy alone, and every eviction under a prefetch, which hints and arrivals need."""
    for kind in KINDS:
        for name in policies.NAMES[kind]:
            yield f"{kind} {name}", {kind: name}
    for name in policies.NAMES["eviction"]:
        yield f"eviction {name} prefetch top_k", {"eviction": name, "prefetch": "top_k"}


# traces


def _exact(name: str, *shape: int) -> np.ndarray:
    """Integers from 0 to 255 that no version of numpy and no processor changes."""
    stream = hashlib.shake_256(name.encode()).digest(int(np.prod(shape)))
    return np.frombuffer(stream, np.uint8).reshape(shape)


def _request(name: str, geometry: Geometry, tokens: int, prompt: int) -> Request:
    """Scores in eighths, so that ties abound; weights are shares of the chosen scores, which only divides."""
    shape = (tokens, geometry.layers, geometry.experts)
    logits, *looks = ((_exact(f"{name} {part}", *shape) % 32).astype(np.float32) / 8 for part in range(3))
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., : geometry.k]
    scores = np.take_along_axis(logits, chosen, -1) + 1
    return Request(chosen, prompt, scores / scores.sum(-1, keepdims=True), logits, tuple(looks))


def _small(name: str, sizes: Sequence[int], experts: int, requests: Sequence[tuple[int, int]]) -> Trace:
    """A trace of requests of (tokens, prompt)."""
    router = Router(renormalise=True)
    shape = {"layers": len(sizes), "experts": experts, "k": 2, "expert_bytes": tuple(sizes), "router": router}
    geometry = Geometry.model_validate(shape)
    rows = [_request(f"{name} {i}", geometry, *lengths) for i, lengths in enumerate(requests)]
    return memory_trace(Header(geometry=geometry, lookahead_depth=2), rows)


@cache
def trace_of(name: str) -> Trace:
    """The trace of that name in SETTINGS."""
    if name == "sample":
        return open_trace(SAMPLE)
    if name == "prefill":
        return _small(name, (240, 240, 240), 8, [(28, 24), (40, 33), (9, 8)])
    return _small(name, (100, 300, 700, 200), 6, [(20, 4), (26, 2), (14, 0)])


MACHINE = str(HERE / "machine.toml")
SETTINGS: dict[str, dict[str, Any]] = {
    "sample": {"capacity": "25%"},
    "prefill": {"capacity": "50%", "platform": MACHINE},
    "unequal": {"capacity": "45%", "platform": MACHINE, "reset": "request", "passes": "chunk:3"},
}


# digests


def digest_of(run: Replay, counters: Sequence[str], log: bool, engine: str = "compiled") -> Row:
    """Identity, and hashes of results and of the event log if `log`; or what a refusal says."""
    trace = trace_of(run.trace)
    try:
        result = replay(trace, run.config, log, engine)
    except PolicyError as error:
        return {"refused": str(error)}
    row = {"identity": result.about["identity"], "result": _hash(_figures(result, counters))}
    return row | ({"events": _hash([list(vars(event).values()) for event in result.events])} if log else {})


def _figures(result: Result, counters: Sequence[str]) -> list[Any]:
    totals = _named(result.totals, [*counters, "time_ns", "lifetime"])
    layers = [_named(row, [*OF_LAYER, *counters]) for row in result.per_layer]
    return [totals, layers, [_named(row, [*REQUEST_TIMES, *counters]) for row in result.per_request]]


def _named(row: Mapping[str, Any], names: Sequence[str]) -> Row:
    return {name: row[name] for name in names}


def _hash(document: object) -> str:
    return hashlib.sha256(canonical(document)).hexdigest()[:DIGITS]


def exp_of_this_machine() -> str:
    """A hash of what numpy makes of `exp` here, in both precisions."""
    points = np.arange(-4096, 4096)
    values = [np.exp(points.astype(kind) / 128) for kind in (np.float32, np.float64)]
    return hashlib.sha256(b"".join(each.tobytes() for each in values)).hexdigest()[:DIGITS]
