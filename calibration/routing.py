"""Fit a routing model to a trace: strengths by layer at which drawn routing has the real one's hit rates.

The fit compares misses of LRU, LFU, Belady and a static placement at five capacities, with a pool per layer and one
token per pass. The search is Levenberg and Marquardt's, over the same random numbers throughout, in three parts: one
set of strengths for all layers, by their mean misses; then each layer by itself, held near the shared strengths the
more, the more its misses differ between two halves of what is fitted; then a correction of all layers together, by
mean misses again and over other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.simulator.routing import Layer, misses_of
from moereplay.traces.geometry import recognised
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import PARTS, Error, Noise, RoutingModel, draw, text_of
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.summary import summarise

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  #: of the experts of a layer
JUDGED = ("lru", "lfu:count=history", "least_stale", "static", "belady", "random")
JUDGED_SHARES = (0.05, 0.1, 0.25, 0.5)  #: lower than those fitted, as small caches are the usual ones
FITTED_TOKENS = 3072  #: most tokens, which bounds the time of a fit; the same number is judged
STEPS = 3
LEAST_TOKENS = 64
#: Two mixtures from which the shared strengths are searched.
START = (
    (1.0, 1.0, 0.7, 0.7, 0.7, 1.0, 100.0, 4.0),
    (2.0, 2.0, 1.5, 1.5, 1.0, 2.0, 40.0, 2.0),
)
SHARED_STEPS, CORRECTIONS = 4, 2
SHARED_LAYERS, CORRECTED_LAYERS = 6, 16  #: that stand for all
#: Standard deviations of logarithms: of shared strengths about a start, of a layer's about the shared, of corrections.
SHARED_SPREAD, LAYER_SPREAD, CORRECTION_SPREAD = 1.5, 0.7, 0.4
LOW, HIGH = np.log([0.03] * 6 + [0.3] * 2), np.log([12.0] * 6 + [2000.0] * 2)
#: Errors of hit rates and of the logarithm of misses that have equal weight.
HITS, MISSES = 0.01, 0.06
NUDGE, FARTHEST = 0.2, 1.0  #: of logarithms, for a derivative and for a step
LEAST_RATIO = 1e-3  #: of misses, below which differences do not matter

Requests = tuple[np.ndarray, list[int]]  #: ids (T, L, k), and the lengths of the requests


class Target(NamedTuple):
    """Miss ratios (L, M) of the real requests, to which strengths are fitted, and their tolerance."""

    misses: np.ndarray
    hits_within: np.ndarray  #: (M,) of a layer's hit rates
    misses_within: np.ndarray  #: (M,) of the logarithm of its misses
    lengths: list[int]
    capacities: list[int]


def units(layers: int) -> int:
    """Return the units of work of a fit, for its progress: shared, each layer, correction, judgement."""
    return layers + 5


def fit(
    trace: Trace, name: str, steps: int = STEPS, seed: int = 0, done: Callable[[int], None] = lambda units: None
) -> RoutingModel:
    """Fit a routing model to every second request of the trace, judge it on the others, and return it.

    `steps` is the number of steps by layer; `done` takes units of work. Raises ConfigError if too few tokens are left.
    """
    parts, geometry = fitted_and_judged(trace), trace.geometry
    shape = {"layers": geometry.layers, "experts": geometry.experts, "k": geometry.k}
    like = recognised(trace.header.provenance.model, geometry)
    first = RoutingModel.model_validate(
        {"name": name, "model": like.name if like else "", **shape}
        | {part: (START[0][at],) * geometry.layers for at, part in enumerate(PARTS)}
    )
    found = _searched(first, _target(*parts[0], geometry), steps, seed, done)
    judged = error(found, parts[0], parts[1], geometry, seed + 1, done)
    return found.model_copy(update={"recall": _recall(trace), "error": judged})


def fitted_and_judged(trace: Trace, most: int = FITTED_TOKENS) -> tuple[Requests, Requests]:
    """Return requests 0, 2, 4, ... from the start of a trace, and 1, 3, 5, ... from its end, of `most` tokens each.

    So a long recording is judged on another part than the one fitted, as any text that a user has is. A single request
    is divided into halves. Tokens without k experts in some layer are left out.
    """
    ids, offsets = _rows(trace)
    if len(offsets) == 2:  # one request
        offsets = np.array([0, len(ids) // 2, len(ids)])
    requests = np.arange(len(offsets) - 1)
    return _selected(ids, offsets, requests[::2], most), _selected(ids, offsets, requests[1::2][::-1], most)


def _recall(trace: Trace) -> tuple[float, ...] | None:
    """Return the mean over layers of the recall of the trace's look-ahead, by depth; None without look-ahead."""
    if not trace.header.lookahead_depth:
        return None
    layers = [each.recall for each in summarise(trace).layers]
    depths = range(1, min(trace.header.lookahead_depth, trace.geometry.layers - 1) + 1)
    return tuple(round(fmean(each[depth] for each in layers if depth in each), 4) for depth in depths)


def _rows(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and offsets of the tokens that have k experts in every layer."""
    ids, offsets = np.asarray(trace.read("chosen")), np.asarray(trace.request_offsets)
    whole = (ids >= 0).all(axis=(1, 2))
    if whole.sum() < LEAST_TOKENS:
        raise ConfigError(
            f"{int(whole.sum())} tokens have {ids.shape[2]} experts in every layer: expected {LEAST_TOKENS} or more"
        )
    kept = np.concatenate([[0], np.cumsum(whole)])[offsets]
    return ids[whole], np.unique(kept)


def _selected(ids: np.ndarray, offsets: np.ndarray, requests: np.ndarray, most: int) -> Requests:
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


def _target(chosen: np.ndarray, lengths: list[int], geometry: Geometry) -> Target:
    """Return the misses of ids (T, L, k), and as their tolerances half the differences between two halves."""
    capacities = [max(geometry.k, round(share * geometry.experts)) for share in SHARES]

    def ratios(rows: np.ndarray) -> np.ndarray:
        return np.array([_ratios(rows[:, layer], geometry.experts, capacities) for layer in range(geometry.layers)])

    half = len(chosen) // 2
    first, last = ratios(chosen[:half]), ratios(chosen[half : 2 * half])
    apart = np.sqrt(((first - last) ** 2).mean(axis=0)) / 2
    logs = np.sqrt(((_logs(first) - _logs(last)) ** 2).mean(axis=0)) / 2
    return Target(ratios(chosen), np.hypot(HITS, apart), np.hypot(MISSES, logs), lengths, capacities)


def _ratios(chosen: np.ndarray, experts: int, capacities: list[int]) -> np.ndarray:
    return misses_of(chosen, experts, capacities) / chosen.size


def _logs(ratios: np.ndarray) -> np.ndarray:
    return np.log(ratios + LEAST_RATIO)


# -- search


def _searched(first: RoutingModel, real: Target, steps: int, seed: int, done: Callable[[int], None]) -> RoutingModel:
    """Return the strengths found: shared, by layer, corrected."""
    text = text_of(first, real.lengths, seed)

    def layer_of(layer: int, seed: int = seed, text: np.ndarray = text) -> Layer:
        return Layer(Noise(first, layer, real.lengths, seed, text), real.lengths, first.k)

    def misses(layer: Layer, logs: np.ndarray) -> np.ndarray:
        return _ratios(layer.draw(np.exp(logs)), first.experts, real.capacities)

    def mean_search(places: Sequence[int], base: np.ndarray, spread: float, steps: int, seed: int) -> tuple:
        """Search offsets of the logarithms (len(places), 8) that match the mean misses of the given layers."""
        text = text_of(first, real.lengths, seed)
        layers = [layer_of(place, seed, text) for place in places]
        wanted = real.misses[places].mean(axis=0)

        def far(more: np.ndarray) -> np.ndarray:
            each = [misses(layer, _within(logs + more)) for layer, logs in zip(layers, base, strict=True)]
            off = np.mean(each, axis=0)
            return np.concatenate([(off - wanted) / HITS, (_logs(off) - _logs(wanted)) / MISSES])

        return _least(far, np.zeros(len(PARTS)), spread, steps)

    places = _spread(first.layers, SHARED_LAYERS)
    tried = [
        (start, *mean_search(places, np.tile(start, (len(places), 1)), SHARED_SPREAD, SHARED_STEPS, seed))
        for start in np.log(START)
    ]
    start, more, _ = min(tried, key=lambda each: each[2])
    shared = _within(start + more)
    done(1)
    best = np.tile(shared, (first.layers, 1))
    for layer in range(first.layers):
        drawn, wanted = layer_of(layer), real.misses[layer]

        def far(more: np.ndarray, drawn: Layer = drawn, wanted: np.ndarray = wanted) -> np.ndarray:
            off = misses(drawn, _within(shared + more))
            logs = (_logs(off) - _logs(wanted)) / real.misses_within
            return np.concatenate([(off - wanted) / real.hits_within, logs])

        best[layer] = _within(shared + _least(far, np.zeros(len(PARTS)), LAYER_SPREAD, steps)[0])
        done(1)
    places = _spread(first.layers, CORRECTED_LAYERS)
    best = _within(best + mean_search(places, best[places], CORRECTION_SPREAD, CORRECTIONS, seed + 1)[0])
    done(1)
    return _with(first, best)


def _within(logs: np.ndarray) -> np.ndarray:
    return np.clip(logs, LOW, HIGH)


def _spread(layers: int, most: int) -> list[int]:
    """Return at most `most` layers, evenly spread."""
    return np.unique(np.linspace(0, layers - 1, min(layers, most)).round().astype(int)).tolist()


def _least(
    far: Callable[[np.ndarray], np.ndarray], at: np.ndarray, spread: float, steps: int
) -> tuple[np.ndarray, float]:
    """Return where the squares of `far`, and of the way from the start in units of `spread`, are least; and the sum."""
    start = at

    def all_of(place: np.ndarray) -> np.ndarray:
        return np.concatenate([far(place), (place - start) / spread])

    now, damping = all_of(at), 1.0
    for _ in range(steps):
        slopes = np.stack([(all_of(at + NUDGE * way) - now) / NUDGE for way in np.eye(len(at))], axis=1)
        square, pull = slopes.T @ slopes, slopes.T @ now
        for _ in range(3):
            step = -np.linalg.solve(square + damping * np.diag(np.diag(square)), pull)
            step *= min(1.0, FARTHEST / max(1e-9, np.abs(step).max()))
            there = all_of(at + step)
            if there @ there < now @ now:
                at, now, damping = at + step, there, damping / 4
                break
            damping *= 4
    return at, float(now @ now)


def _with(model: RoutingModel, logs: np.ndarray) -> RoutingModel:
    values = np.exp(logs)
    return model.model_copy(update={part: tuple(values[:, at].tolist()) for at, part in enumerate(PARTS)})


# -- judgement


def error(
    model: RoutingModel,
    fitted: Requests,
    judged: Requests,
    geometry: Geometry,
    seed: int,
    done: Callable[[int], None] = lambda units: None,
) -> Error:
    """Compare hit rates of drawn requests, and of the fitted ones, with those of real requests of the same lengths."""
    real = rates(*judged, geometry)
    done(1)
    drawn = rates(draw(model, judged[1], seed), judged[1], geometry)
    done(1)
    half = rates(*fitted, geometry)
    done(1)
    return Error(
        hit_points=_points(drawn, real),
        misses=_misses_off(drawn, real),
        requests=len(judged[1]),
        halves=_points(half, real),
        halves_misses=_misses_off(half, real),
    )


def _points(found: np.ndarray, real: np.ndarray) -> float:
    """Return the mean difference, without cells that are 0 by definition: one pool smaller than a token's demand."""
    return round(100 * float(np.abs(found - real)[np.maximum(found, real) > 0].mean()), 2)


def _misses_off(found: np.ndarray, real: np.ndarray) -> float:
    return round(float(np.median(np.abs((1 - found) / np.maximum(1 - real, 1e-9) - 1))), 3)


def _plain(geometry: Geometry) -> Geometry:
    """Return the shape with experts of one size: bytes change no hit rate of a pool per layer."""
    return Geometry(
        layers=geometry.layers, experts=geometry.experts, k=geometry.k, expert_bytes=(1 << 20,) * geometry.layers
    )


def rates(
    chosen: np.ndarray,
    lengths: Sequence[int],
    geometry: Geometry,
    evictions: Sequence[str] = JUDGED,
    shares: Sequence[float] = JUDGED_SHARES,
) -> np.ndarray:
    """Return hit rates by pools (one per layer, one for all), eviction and share that holds an expert of a layer."""
    trace = from_arrays(chosen, _plain(geometry), lengths=list(lengths))
    found = []
    for scope in ("per_layer", "global"):
        for eviction in evictions:
            for share in (share for share in shares if share * geometry.experts >= 1):
                config = configure(capacity=f"{100 * share}%", eviction=eviction, scope=scope, passes="token")
                totals = replay(trace, config).totals
                found.append(totals["hits"] / totals["accesses"])
    return np.array(found)
