"""Expected hits: the share of a token's experts that a memory holds in steady decoding, by how it is filled.

A memory of a share of all experts holds whole layers (the same share of the demand), the experts that earlier requests
used most (`static`), or the most recently used ones (`lru`, in a pool per layer or one for all layers).

A short trace is judged in its second half, with the first half as history. There an expert may be used for the first
time, which says nothing about its last use in a system that has served for long: the depth of such a use in the LRU
order is taken to be uniform below the experts that were seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moereplay.simulator.curves.curve import Curve, curve
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import RoutingModel, draw
from moereplay.traces.schema import Geometry, Trace

LAYERS, STATIC, LRU, GLOBAL_LRU = "layers", "static", "lru", "lru in one pool"
SAMPLED_LAYERS = 12  #: of a routing model; hits are a mean over layers
DRAWN = (192,) * 4  #: tokens of each drawn request
MOST_TOKENS = 4096  #: of a recorded trace
POINTS = 1025  #: shares at which hits are known, linear in between


@dataclass(frozen=True, eq=False)
class Hits:
    """Hits of one routing, by how a memory is filled, at POINTS shares of all experts from 0 to 1."""

    routing: str
    held: Mapping[str, np.ndarray]

    def at(self, filled: str, share: float) -> float:
        """Return the share of demanded experts in a memory that holds `share` of all experts."""
        if share >= 1 or filled == LAYERS:
            return min(1.0, max(0.0, share))
        return float(np.interp(share, np.linspace(0, 1, POINTS), self.held[filled]))


def of_model(routing: RoutingModel, seed: int = 0) -> Hits:
    """Return the hits of a routing model, drawn at some of its layers."""
    places = np.unique(np.linspace(0, routing.layers - 1, min(routing.layers, SAMPLED_LAYERS)).round().astype(int))
    return _counted(routing.name, draw(routing.at_layers(places.tolist()), DRAWN, seed), list(DRAWN), routing.experts)


def of_trace(trace: Trace) -> Hits:
    """Return the hits of recorded routing, from at most MOST_TOKENS tokens that have k experts in every layer."""
    ids, offsets = np.asarray(trace.read("chosen")), np.asarray(trace.request_offsets)
    whole = (ids >= 0).all(axis=(1, 2))
    ends = np.concatenate([[0], np.cumsum(whole)])[offsets]
    kept = ids[whole][:MOST_TOKENS]
    lengths = np.diff(np.unique(np.minimum(ends, MOST_TOKENS))).tolist()
    name = trace.header.provenance.model
    return _counted(name, kept, lengths, trace.geometry.experts)


def _counted(routing: str, chosen: np.ndarray, lengths: list[int], experts: int) -> Hits:
    """Count the hits of ids (T, L, k), whose requests have these lengths."""
    half, before = _half(lengths)
    first, last = chosen[:half], chosen[half:]
    held = {
        LRU: _steady(chosen, first, (lengths, before), experts, "per_layer"),
        GLOBAL_LRU: _steady(chosen, first, (lengths, before), experts, "global"),
        STATIC: _static(first, last, experts),
    }
    return Hits(routing, held)


def _half(lengths: list[int]) -> tuple[int, list[int]]:
    """Return the tokens of the first half of the requests, at least a half of a single one, and their lengths."""
    if len(lengths) == 1:
        return lengths[0] // 2, [lengths[0] // 2]
    before = lengths[: len(lengths) // 2]
    return sum(before), before


def _steady(
    chosen: np.ndarray, first: np.ndarray, lengths: tuple[list[int], list[int]], experts: int, scope: str
) -> np.ndarray:
    """Return the hits (POINTS,) of LRU after the first part."""
    geometry = _plain(chosen.shape[1], experts, chosen.shape[2])
    whole, history = (
        curve(from_arrays(ids, geometry, lengths=each), "lru", scope, "token")
        for ids, each in ((chosen, lengths[0]), (first, lengths[1]))
    )
    accesses = whole.accesses - history.accesses
    seen = history.compulsory + (whole.compulsory - history.compulsory) / 2
    unseen = (whole.compulsory - history.compulsory) / accesses
    total = geometry.layers * experts
    capacity = whole.capacity_experts
    deeper = np.clip((capacity - seen) / max(1.0, total - seen), 0, 1)
    hits = 1 - (_misses(whole) - _misses(history)) / accesses + unseen * deeper
    return np.interp(np.linspace(0, 1, POINTS), np.concatenate([[0], capacity / total]), np.concatenate([[0], hits]))


def _misses(counted: Curve) -> np.ndarray:
    """Return misses at each capacity; below one step's demand, where times decide, every access counts as one."""
    return np.where(counted.decided, counted.misses, counted.accesses)


def _static(first: np.ndarray, last: np.ndarray, experts: int) -> np.ndarray:
    """Return the hits (POINTS,) of each layer's most used experts of the first part in the last one."""
    layers = first.shape[1]
    held = np.zeros(experts + 1)
    for layer in range(layers):
        used = np.bincount(first[:, layer].ravel(), minlength=experts)
        found = np.bincount(last[:, layer].ravel(), minlength=experts)
        held[1:] += np.cumsum(found[np.argsort(-used, kind="stable")]) / max(1, found.sum())
    return np.interp(np.linspace(0, 1, POINTS), np.linspace(0, 1, experts + 1), held / layers)


def _plain(layers: int, experts: int, k: int) -> Geometry:
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(1 << 20,) * layers)
