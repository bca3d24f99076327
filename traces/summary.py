"""Statistics of a trace: evenness of use, reuse between tokens, recall of look-ahead, use counts, origin of routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from moereplay.traces.derived import derived
from moereplay.traces.documents import DocumentError, from_json
from moereplay.traces.growing import Growing, Rows, append, token_blocks
from moereplay.traces.patterns import shared
from moereplay.traces.routers import choice_scores
from moereplay.traces.schema import LOOKAHEAD, Geometry, Provenance, Trace

WINDOWS = (8, 64, 512)  #: tokens
BLOCK_BYTES = 64 * 2**20  #: of the (tokens, L, E) table of uses held at a time


@dataclass(frozen=True)
class LayerSummary:
    """Statistics of one layer; dicts lack windows and depths that the trace is too short or shallow for."""

    entropy: float  #: of expert use, as a share of log E: 1 is even use
    imbalance: float  #: uses of the busiest expert over the mean
    reuse: float  #: share of a token's experts that the next token of the request uses again
    distinct: dict[int, float]  #: window of tokens -> mean number of experts used in it
    recall: dict[int, float]  #: depth d -> share of layer l + d's chosen within the top k of this layer's look-ahead


@dataclass(frozen=True)
class Summary:
    """Statistics of a trace; bytes are those of all experts of all layers at the stored precision."""

    geometry: Geometry
    requests: int
    tokens: int
    prompt_tokens: int
    bytes_of_experts: int
    capabilities: tuple[str, ...]
    chance: float  #: the reuse of tokens that have nothing in common: k / E where all layers have the same k
    layers: tuple[LayerSummary, ...]

    @property
    def decode_tokens(self) -> int:
        """Tokens after the prompts."""
        return self.tokens - self.prompt_tokens

    @property
    def reuse(self) -> float:
        """Adjacent-token reuse, mean over layers."""
        return float(np.mean([layer.reuse for layer in self.layers]))


@dataclass
class Tally:
    """Sums per layer that grow block by block."""

    uses: np.ndarray  #: (L, E)
    reused: np.ndarray  #: (L,)
    reusable: np.ndarray  #: (L,)
    distinct: dict[int, np.ndarray] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    foreseen: dict[int, np.ndarray] = field(default_factory=dict)  #: depth -> (L - d,)
    foreseeable: dict[int, np.ndarray] = field(default_factory=dict)


def summarise(trace: Trace) -> Summary:
    """Compute the statistics of a whole trace in blocks that never mix requests. Raises TraceError for damaged rows."""
    geometry = trace.geometry
    reused, reusable = np.zeros((2, geometry.layers), np.int64)
    tally = Tally(np.zeros((geometry.layers, geometry.experts), np.int64), reused, reusable)
    for start, stop, first in _blocks(trace):
        # one token more in front, so that reuse is counted across the border of two blocks
        rows = trace.read("chosen", max(start - 1, first), stop)
        chosen = rows[len(rows) - (stop - start) :]
        tally.reused += shared(rows[1:], rows[:-1]).sum(0)
        tally.reusable += (rows[:-1] >= 0).sum((0, 2))
        _count_use(tally, chosen, geometry.experts)
        _count_foreseen(tally, trace, chosen, start)
    return Summary(
        geometry=geometry,
        requests=trace.requests,
        tokens=trace.tokens,
        prompt_tokens=int(trace.prompt_lengths.sum()),
        bytes_of_experts=geometry.total_bytes,
        capabilities=tuple(sorted(trace.capabilities)),
        chance=chance_of(experts_per_token(trace), geometry.experts),
        layers=tuple(_layer(tally, layer) for layer in range(geometry.layers)),
    )


def _blocks(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """Yield start and stop of pieces that hold whole windows, and the first token of their request."""
    longest = WINDOWS[-1]
    fits = BLOCK_BYTES // (trace.geometry.layers * trace.geometry.experts)
    size = max(fits // longest, 1) * longest
    for first, last in zip(trace.request_offsets[:-1].tolist(), trace.request_offsets[1:].tolist(), strict=True):
        for start in range(first, last, size):
            yield start, min(start + size, last), first


def _count_use(tally: Tally, chosen: np.ndarray, experts: int) -> None:
    """Count uses per expert, and distinct experts in adjacent whole windows."""
    tokens, layers, _ = chosen.shape
    table = np.zeros((tokens, layers, experts + 1), bool)  # the last column takes the -1s
    np.put_along_axis(table, chosen.astype(np.intp), True, -1)
    used = table[..., :experts]
    tally.uses += used.sum(0)
    for window in WINDOWS:
        whole = tokens // window
        if whole:
            seen = used[: whole * window].reshape(whole, window, layers, experts).any(1).sum((0, 2))
            tally.distinct[window] = tally.distinct.get(window, 0) + seen
            tally.windows[window] = tally.windows.get(window, 0) + whole


def _count_foreseen(tally: Tally, trace: Trace, chosen: np.ndarray, start: int) -> None:
    """Count the experts of layer l + d among the k that its gate ranks highest on the residual of layer l."""
    geometry = trace.geometry
    for depth in range(1, min(trace.header.lookahead_depth, geometry.layers - 1) + 1):
        rows = trace.read(f"{LOOKAHEAD}{depth}", start, start + len(chosen))[:, :-depth]
        bias = None if trace.router_bias is None else trace.router_bias[depth:]
        scores = choice_scores(geometry.router, rows, bias)
        best = np.argpartition(scores, geometry.experts - geometry.k, axis=-1)[..., -geometry.k :]
        hits, all_ = shared(best, chosen[:, depth:]).sum(0), (chosen[:, depth:] >= 0).sum((0, 2))
        tally.foreseen[depth] = tally.foreseen.get(depth, 0) + hits
        tally.foreseeable[depth] = tally.foreseeable.get(depth, 0) + all_


def _layer(tally: Tally, layer: int) -> LayerSummary:
    uses = tally.uses[layer]
    shares = uses[uses > 0] / max(uses.sum(), 1)
    even = np.log(len(uses)) if len(uses) > 1 else 1.0
    depths = [depth for depth, hits in tally.foreseen.items() if layer < len(hits)]
    return LayerSummary(
        entropy=float(-(shares * np.log(shares)).sum() / even),
        imbalance=float(uses.max() / max(uses.mean(), 1e-12)),
        reuse=float(tally.reused[layer] / max(tally.reusable[layer], 1)),
        distinct={window: float(seen[layer] / tally.windows[window]) for window, seen in tally.distinct.items()},
        recall={d: float(tally.foreseen[d][layer] / max(tally.foreseeable[d][layer], 1)) for d in depths},
    )


# -- Use counts

LOOKED_AT, PLACES = 1 << 20, 16  #: choices sampled for a mean, at this many places of a long trace


def uses(trace: Trace) -> np.ndarray:
    """Count the choices of each expert over all tokens, (L, E) int64, without -1. Raises TraceError."""
    layers, experts, k = trace.geometry.layers, trace.geometry.experts, trace.geometry.k
    counts = np.zeros(layers * experts, np.int64)
    first = np.arange(layers)[None, :, None] * experts
    for start, stop in token_blocks(trace, layers * k):
        chosen = trace.read("chosen", start, stop).astype(np.int64)
        counts += np.bincount((chosen + first)[chosen >= 0], minlength=len(counts))
    return counts.reshape(layers, experts)


def experts_per_token(trace: Trace) -> tuple[float, ...]:
    """Return the mean number of experts per token in each layer, (L,), over tokens that have any; k if none has.

    A long trace is sampled at evenly spaced places. Raises TraceError for damaged rows.
    """

    def fill(arrays: Mapping[str, Growing]) -> None:
        append(arrays["mean"], _experts_per_token(trace))

    return tuple(derived(trace, "experts-per-token", {"mean": Rows("<f8", ())}, fill)["mean"].tolist())


def chance_of(per_token: tuple[float, ...], experts: int) -> float:
    """Return the share of a token's experts that another has by chance: k / E if all layers have the same k."""
    low, high = min(per_token), max(per_token)
    mean = low if low == high else sum(count * count for count in per_token) / sum(per_token)
    return mean / experts


def _experts_per_token(trace: Trace) -> np.ndarray:
    layers, k = trace.geometry.layers, trace.geometry.k
    each = max(1, LOOKED_AT // (layers * k) // PLACES)
    starts = sorted({(trace.tokens - each) * place // (PLACES - 1) for place in range(PLACES)})
    if trace.tokens <= each * PLACES:
        starts, each = [0], trace.tokens
    choices, tokens = np.zeros((2, layers), np.int64)
    for start in starts:
        counts = (trace.read("chosen", start, start + each) >= 0).sum(-1)
        choices += counts.sum(0)
        tokens += (counts > 0).sum(0)
    return np.where(tokens, choices / np.maximum(tokens, 1), float(k))


# -- Origin: whether routing was recorded, or how it was generated

SYNTHETIC_MODEL = "synthetic-"  #: prefix of the model name of a synthetic trace
IMPORTER = "synthetic"
RECORDED = "recorded"  #: the part of a merged trace whose routing is not synthetic


def synthetic(provenance: Provenance) -> str:
    """Return how a generator made the routing: `markov, reuse 0.31`; empty for recorded routing."""
    if provenance.synthetic:
        return provenance.synthetic
    if provenance.importer == IMPORTER:
        return _in_words(provenance.source) or named_synthetic(provenance.model) or "generated"
    return named_synthetic(provenance.model)


def named_synthetic(model: str) -> str:
    """Return the kind that the model of a synthetic trace is named after; empty for other models."""
    return model.removeprefix(SYNTHETIC_MODEL) if model.startswith(SYNTHETIC_MODEL) else ""


def synthetic_parts(provenances: Sequence[Provenance]) -> str:
    """Return how the routing of merged traces was made, in any order of merging; empty if all of it was recorded."""
    each = {text for one in provenances for text in (synthetic(one) or RECORDED).split("; ")}
    return "; ".join(sorted(each - {RECORDED}) + [RECORDED] * (RECORDED in each)) if each != {RECORDED} else ""


@lru_cache(maxsize=64)
def _in_words(source: str) -> str:
    """Return the kind and statistics from the source of a synthetic trace; empty if it has none."""
    try:
        said = from_json(source.encode())
    except (DocumentError, ValueError):
        return ""
    if not isinstance(said, dict) or not isinstance(said.get("kind"), str):
        return ""
    statistic = "reuse" if said.get("reuse") is not None else "" if said["kind"] == "cyclic" else "exponent"
    value = said.get(statistic)
    return f"{said['kind']}, {statistic} {value:g}" if isinstance(value, int | float) else said["kind"]
