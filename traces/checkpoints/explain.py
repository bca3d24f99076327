"""A model's sizes in words, for `moereplay models NAME`."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.traces.dense import dense_of
from moereplay.traces.frozen import Cached
from moereplay.traces.geometry import KnownModel
from moereplay.traces.texts import size


def explained(model: KnownModel) -> list[tuple[str, str]]:
    """Return (heading, text) pairs: shape, bytes of experts and dense weights, KV cache, and sources."""
    return [pair for pair in _pairs(model) if pair[1]]


def _pairs(model: KnownModel) -> Iterator[tuple[str, str]]:
    geometry = model.geometry
    dense = dense_of(geometry)
    experts = geometry.experts * sum(geometry.expert_bytes)
    active = geometry.k * sum(geometry.expert_bytes) + dense.read
    stored = model.quant or (geometry.weight_format or model.published.format)
    first = f", after {model.dense_layers} without experts" if model.dense_layers else ""
    shared = f", and {geometry.shared_experts} shared" if geometry.shared_experts else ""
    yield "model", model.name
    yield "other names", ", ".join(model.aliases)
    yield "MoE layers", f"{geometry.layers}{first}"
    yield "experts", f"{geometry.experts} in a layer, {geometry.k} per token{shared}"
    yield "weights", f"{model.params / 1e9:.4g} billion" if model.params else ""
    yield "an expert", f"{_each(geometry.expert_bytes)}, {geometry.expert_bits:.4g} bits per weight ({stored})"
    yield "all experts", size(experts)
    yield (
        "dense weights",
        f"{size(dense.resident)} in memory, {size(dense.read)} read per token" if dense.read else "unknown",
    )
    yield "a token reads", f"{size(active)}: {active / (experts + dense.resident):.1%} of all"
    yield "KV cache", _cache(model)
    yield "context", f"{model.context:,} positions" if model.context else ""
    yield "layers of MTP", f"{model.mtp}, which no size here counts" if model.mtp else ""
    yield "router", geometry.router.family
    yield "source", model.source
    yield "note", model.note


def _each(sizes: tuple[int, ...]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least / 2**20:.4g} MiB" if least == most else f"{least / 2**20:.4g} to {most / 2**20:.4g} MiB"


def _cache(model: Cached) -> str:
    if not model.kv_bytes:
        return ""
    windows = ", ".join(f"{each.positions:,}" for each in model.kv_windows)
    after = f", of which a part stops growing at {windows} positions" if windows else ""
    return f"{size(model.kv_bytes)} per position at 16 bits{after}; {size(model.kv_cache(4096))} at 4,096"
