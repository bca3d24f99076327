"""How a cache begins: empty, or full as in a system that has served for long.

Decoding at a steady rate is what a recommendation is asked about, and a recording is short: its first uses, which any
cache misses that begins empty, may be most of its misses. So sets are searched from a full cache: of whole layers,
counted from the last one, as engines without a profile keep them; or of the experts that the first half of the trace's
tokens used most per byte. A short trace makes no profile: filled by its own uses, a cache would know which experts are
to come. There arbitrary experts of all layers stand for what other requests left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import plan
from moereplay.traces.blocks import token_blocks
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace
from moereplay.traces.shared import shared
from moereplay.traces.units import NEVER

EMPTY, LAYERS, USED, ANY = "empty", "layers", "used", "any"
SHORT = 0.95  #: of hits: a trace that allows fewer from an empty cache is short
STATIC = "static:profile=given"  #: what is there from the start stays
GIVEN = "profile=given"

Experts = tuple[tuple[int, int], ...]  #: (layer, expert)


def started(trace: Trace, config: ReplayConfig, start: str) -> ReplayConfig | None:
    """Return the configuration with its cache filled at the start; None where it cannot be replayed so.

    A policy that is fitted to a given profile gets the order of filling, or of whole layers what they hold.
    """
    order = order_of(trace, USED if start == EMPTY else start)
    empty = config.model_copy(update={"warm": (), "profile": order if GIVEN in config.eviction else ()})
    if start == EMPTY:
        return empty
    try:
        ready = plan(trace, empty)
    except (ConfigError, PolicyError):
        return None
    warm = _filled(order, ready.capacity.pools, ready.layout.tiers[0], trace.geometry.experts * (start == LAYERS))
    if not warm:
        return None
    profile = warm if start == LAYERS and empty.profile else empty.profile
    return empty.model_copy(update={"warm": warm, "profile": profile})


def filling(trace: Trace, passes: str) -> str:
    """Return what fills the cache of a set that places no whole layers: ANY for a short trace."""
    return USED if compulsory_limit(trace, passes) >= SHORT else ANY


def start_of(trace: Trace, config: ReplayConfig) -> str:
    """Return how the cache of a configuration begins: whole layers are those of which every expert is there."""
    if not config.warm:
        return EMPTY
    layers = {layer for layer, _ in config.warm}
    return LAYERS if len(layers) * trace.geometry.experts == len(config.warm) else filling(trace, config.passes)


def order_of(trace: Trace, start: str) -> Experts:
    """Return all experts, those first that such a start holds first. Raises TraceError if the trace is damaged."""
    return shared(trace, f"start {start}", partial(_order, trace, start))


def compulsory_limit(trace: Trace, passes: str) -> float:
    """Return the share of hits that no cache exceeds which begins empty."""
    demand = demand_of(trace, passes)
    return 1 - float((np.asarray(demand.first_use) != NEVER).sum()) / max(1, len(demand.expert))


def _order(trace: Trace, start: str) -> Experts:
    geometry = trace.geometry
    pairs = [(layer, expert) for layer in reversed(range(geometry.layers)) for expert in range(geometry.experts)]
    if start == LAYERS:
        return tuple(pairs)
    if start == ANY:
        drawn = np.random.default_rng(0).permuted(np.tile(np.arange(geometry.experts), (geometry.layers, 1)), axis=1)
        return tuple(
            (layer, int(drawn[layer, at])) for at in range(geometry.experts) for layer in range(geometry.layers)
        )
    worth = _first_uses(trace) / np.array(geometry.expert_bytes)[:, None]
    return tuple(sorted(pairs, key=lambda pair: -worth[pair]))  # of equals, the later layer first


def _first_uses(trace: Trace) -> np.ndarray:
    """How often each expert was chosen in the first half of the tokens, (L, E)."""
    geometry, half = trace.geometry, -(-trace.tokens // 2)
    counts = np.zeros((geometry.layers, geometry.experts), np.int64)
    for begin, end in token_blocks(trace, geometry.layers * geometry.k):
        chosen = trace.read("chosen", begin, min(end, half)) if begin < half else np.empty((0, geometry.layers, 1))
        for layer in range(geometry.layers):
            ids = chosen[:, layer].ravel().astype(np.int64)
            counts[layer] += np.bincount(ids[ids >= 0], minlength=geometry.experts)
    return counts


def _filled(order: Experts, pools: Sequence[int], sizes: Sequence[int], together: int) -> Experts:
    """The first of an order that fit their pools; in groups of so many that are there as a whole, if any."""
    left, held = list(pools), []
    step = max(1, together)
    for at in range(0, len(order), step):
        group = order[at : at + step]
        pool = group[0][0] if len(left) > 1 else 0
        needed = sizes[group[0][0]] * len(group)
        if needed <= left[pool]:
            left[pool] -= needed
            held += group
        elif together:
            break
    return tuple(held)
