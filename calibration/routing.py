"""Fit a routing model to a trace: strengths by layer at which drawn routing has the real one's hit rates.

Distance is measured by replays: misses of LRU, Belady, LFU and a static placement at five capacities, with a pool per
layer and one token per pass. All layers are searched at once, each by itself, over the same
random numbers, so that a step changes the strengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.traces.geometry import recognised
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import PARTS, Error, Noise, RoutingModel, draw, ranked, text_of
from moereplay.traces.schema import Geometry, Trace

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  #: of the experts of a layer
REPLAYED = ("lfu:count=history", "static")  #: evictions that are replayed; LRU and Belady are counted by their curves
JUDGED = ("lru", "lfu:count=history", "least_stale", "static", "belady", "random")
FITTED_TOKENS = 3072  #: at most, which bounds the time of a fit
STEPS = 60
LEAST_TOKENS = 64
START = {"hot": 1.0, "cold": 1.0, "request": 0.7, "slow": 0.7, "fast": 0.7, "kind": 1.0}
START |= {"slow_tokens": 100.0, "fast_tokens": 4.0}
LEAST = 0.03  #: strength below which a part does nothing
#: Errors of hit rates and of the logarithm of misses that count alike.
HITS, MISSES = 0.02, 0.15


def fit(
    trace: Trace, name: str, steps: int = STEPS, seed: int = 0, done: Callable[[int], None] = lambda steps: None
) -> RoutingModel:
    """Fit a routing model to every second request of the trace, judge it on the others, and return it.

    A single request is divided into halves. Tokens without k experts in some layer are left out. Raises ConfigError if
    too few are left.
    """
    ids, offsets = _rows(trace)
    if len(offsets) == 2:  # one request
        offsets = np.array([0, len(ids) // 2, len(ids)])
    requests = np.arange(len(offsets) - 1)
    fitted, judged = requests[::2], requests[1::2]
    chosen, lengths = _selected(ids, offsets, fitted, FITTED_TOKENS)
    geometry = trace.geometry
    shape = {"layers": geometry.layers, "experts": geometry.experts, "k": geometry.k}
    like = recognised(trace.header.provenance.model, geometry)
    first = RoutingModel.model_validate(
        {"name": name, "model": like.name if like else "", **shape}
        | {part: (START[part],) * geometry.layers for part in PARTS}
    )
    found = _searched(first, _misses(chosen, lengths, geometry), lengths, geometry, steps, seed, done)
    return found.model_copy(update={"error": error(found, ids, offsets, judged, geometry, seed + 1)})


def _rows(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and offsets of the tokens that have k experts in every layer."""
    ids, offsets = np.asarray(trace.read("chosen")), np.asarray(trace.request_offsets)
    whole = (ids >= 0).all(axis=(1, 2))
    if whole.sum() < LEAST_TOKENS:
        raise ConfigError(
            f"{int(whole.sum())} tokens have {ids.shape[2]} experts in every layer; expected {LEAST_TOKENS} or more"
        )
    kept = np.concatenate([[0], np.cumsum(whole)])[offsets]
    return ids[whole], np.unique(kept)


def _selected(
    ids: np.ndarray, offsets: np.ndarray, requests: Sequence[int] | np.ndarray, most: int
) -> tuple[np.ndarray, list[int]]:
    """Return the rows of the first requests that have `most` tokens together, and their lengths."""
    parts, lengths, left = [], [], most
    for request in requests:
        rows = ids[offsets[request] : offsets[request + 1]][:left]
        if len(rows):
            parts.append(rows)
            lengths.append(len(rows))
            left -= len(rows)
    return np.concatenate(parts), lengths


# -- misses


def _misses(chosen: np.ndarray, lengths: Sequence[int], geometry: Geometry) -> np.ndarray:
    """Return the miss ratios (L, M) of the fit, by layer."""
    trace = from_arrays(chosen, _plain(geometry), lengths=list(lengths))
    total = len(chosen) * geometry.k
    places = [max(1, round(share * geometry.experts)) - 1 for share in SHARES]
    counted = [curve(trace, policy, "per_layer", "token").layer_misses[:, places] for policy in ("lru", "belady")]
    for eviction in REPLAYED:
        for share in SHARES:
            result = replay(
                trace, configure(capacity=f"{100 * share}%", eviction=eviction, scope="per_layer", passes="token")
            )
            counted.append(np.array([row["misses"] for row in result.per_layer])[:, None])
    return np.concatenate(counted, axis=1) / total


def _plain(geometry: Geometry) -> Geometry:
    """Return the shape with experts of one size: bytes change no hit rate of a pool per layer."""
    return Geometry(
        layers=geometry.layers, experts=geometry.experts, k=geometry.k, expert_bytes=(1 << 20,) * geometry.layers
    )


def _distance(found: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the loss (L,) of miss ratios (L, M)."""
    least = 1e-3
    ratio = np.log((found + least) / (real + least)) / MISSES
    return (((found - real) / HITS) ** 2 + ratio**2).mean(axis=1)


# -- search


def _searched(
    first: RoutingModel,
    real: np.ndarray,
    lengths: Sequence[int],
    geometry: Geometry,
    steps: int,
    seed: int,
    done: Callable[[int], None],
) -> RoutingModel:
    """Return the best strengths found by a random search with a step size for each layer."""
    text = text_of(first, lengths, seed)
    noises = [Noise(first, layer, lengths, seed, text) for layer in range(first.layers)]
    rng = np.random.default_rng(seed)
    best = np.log([[getattr(first, part)[layer] for part in PARTS] for layer in range(first.layers)])
    loss = np.full(first.layers, np.inf)
    step = np.full(first.layers, 0.5)
    for turn in range(steps):
        tried = best.copy()
        if turn:
            axes = rng.random(best.shape) < 0.5
            tried += rng.standard_normal(best.shape) * step[:, None] * axes
            tried = np.clip(tried, np.log(LEAST), np.log(2000.0))
            tried[:, :6] = np.minimum(tried[:, :6], np.log(12.0))
        model = _with(first, tried)
        chosen = np.stack([ranked(noises[layer].scores(model, layer), model.k) for layer in range(model.layers)], 1)
        now = _distance(_misses(chosen, lengths, geometry), real)
        better = now < loss
        best[better], loss[better] = tried[better], now[better]
        step = np.clip(np.where(better, step * 1.4, step * 0.95), 0.05, 0.8)
        done(1)
    return _with(first, best)


def _with(model: RoutingModel, logs: np.ndarray) -> RoutingModel:
    values = np.exp(logs)
    return model.model_copy(update={part: tuple(values[:, at].tolist()) for at, part in enumerate(PARTS)})


# -- judgement


def error(
    model: RoutingModel, ids: np.ndarray, offsets: np.ndarray, judged: np.ndarray, geometry: Geometry, seed: int
) -> Error:
    """Compare hit rates of drawn requests with real ones of the same lengths: 6 evictions, 5 capacities, 2 scopes."""
    chosen, lengths = _selected(ids, offsets, judged, 4 * FITTED_TOKENS)
    real = _rates(chosen, lengths, geometry)
    drawn = _rates(draw(model, lengths, seed), lengths, geometry)
    halves = None
    if len(judged) >= 4:
        parts = [_rates(*_selected(ids, offsets, judged[at::2], 2 * FITTED_TOKENS), geometry) for at in (0, 1)]
        halves = round(100 * float(np.abs(parts[0] - parts[1]).mean()), 2)
    return Error(
        hit_points=round(100 * float(np.abs(drawn - real).mean()), 2),
        misses=round(float(np.median(np.abs((1 - drawn) / (1 - real) - 1))), 3),
        requests=len(lengths),
        halves=halves,
    )


def _rates(chosen: np.ndarray, lengths: Sequence[int], geometry: Geometry) -> np.ndarray:
    """Return hit rates of every judged configuration."""
    trace = from_arrays(chosen, _plain(geometry), lengths=list(lengths))
    rates = []
    for scope in ("per_layer", "global"):
        for eviction in JUDGED:
            for share in SHARES:
                config = configure(capacity=f"{100 * share}%", eviction=eviction, scope=scope, passes="token")
                totals = replay(trace, config).totals
                rates.append(totals["hits"] / totals["accesses"])
    return np.array(rates)
