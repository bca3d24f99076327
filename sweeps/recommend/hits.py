"""Expected hits: the share of a token's experts that a memory holds in steady decoding, by how it is filled.

A memory of a share of all experts holds whole layers (the same share of the demand), the experts that earlier requests
used most (`static`), or the most recently used ones (`lru`, in a pool per layer or one for all layers).

A short trace is judged in its second half, with the first half as history. There an expert may be used for the first
time, which says nothing about its last use in a system that has served for long: the depth of such a use in the LRU
order is taken to be uniform below the experts that were seen.

Streams that decode together and drafts lay several rows in a pass: `Decoding`. The passes are then those of a replay's
schedule, so that their unions, and what a memory holds of these, are counted and not assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moereplay.simulator.curves import lru
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.curves.stream import Cut, demands_of, tally
from moereplay.simulator.errors import ConfigError
from moereplay.traces.demand import demand_of
from moereplay.traces.drafts import Drafts
from moereplay.traces.passes import named_schedule, schedule
from moereplay.traces.recorder import from_arrays
from moereplay.traces.routing import RoutingModel, draw
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.texts import counted

LAYERS, STATIC, LRU, GLOBAL_LRU = "layers", "static", "lru", "lru in one pool"
SAMPLED_LAYERS = 12  #: of a routing model; hits are a mean over layers
DRAWN = (192,) * 4  #: tokens of each drawn request, for up to two streams
MOST_TOKENS = 4096  #: of a recorded trace
POINTS = 1025  #: shares at which hits are known, linear in between


class Decoding(NamedTuple):
    """The rows of a decode pass: each of the streams has its known token and as many drafts."""

    streams: int = 1
    drafts: Drafts = Drafts(0)
    head: bool = True  #: drafts come from a further layer of the model; else they cost nothing (n-grams, look-up)

    @property
    def rows(self) -> int:
        """Rows of a full pass."""
        return self.streams * (1 + self.drafts.many)

    @property
    def tokens(self) -> float:
        """Expected tokens of a full pass that are kept."""
        return self.streams * self.drafts.kept

    @property
    def passes(self) -> str:
        """The schedule of a replay, without its drafts."""
        return "token" if self.streams == 1 else f"batch:{self.streams}"


PLAIN = Decoding()


class Work(NamedTuple):
    """What a pass demands of a layer, on average."""

    union: float  #: distinct experts
    rows: tuple[tuple[int, float], ...] = ((1, 1.0),)  #: how many of its rows chose an expert, and of which share


@dataclass(frozen=True, eq=False)
class Hits:
    """Hits of one routing, by how a memory is filled, at POINTS shares of all experts from 0 to 1."""

    routing: str
    held: Mapping[str, np.ndarray]
    work: Work | None = None  #: of a pass of several rows; None: a token's k experts

    def at(self, filled: str, share: float) -> float:
        """Return the share of the experts that a pass demands in a memory that holds `share` of all experts."""
        if share >= 1 or filled == LAYERS:
            return min(1.0, max(0.0, share))
        return float(np.interp(share, np.linspace(0, 1, POINTS), self.held[filled]))


def of_model(routing: RoutingModel, seed: int = 0) -> Hits:
    """Return the hits of a routing model for one token at a time, drawn at some of its layers."""
    return of_model_at(routing, (PLAIN,), seed)[0]


def of_model_at(routing: RoutingModel, decodings: Sequence[Decoding], seed: int = 0) -> tuple[Hits, ...]:
    """Return the hits of a routing model for each way to decode, all of the same drawn text."""
    return _of_model(routing, tuple(decodings), seed)  # pyright: ignore[reportArgumentType] pydantic gives it a hash


@lru_cache(maxsize=64)  # runs and questions in one process ask for the same few models
def _of_model(routing: RoutingModel, decodings: tuple[Decoding, ...], seed: int) -> tuple[Hits, ...]:
    lengths = _drawn(max(each.streams for each in decodings))
    sampled = SAMPLED_LAYERS if lengths == DRAWN else SAMPLED_LAYERS // 2
    places = np.unique(np.linspace(0, routing.layers - 1, min(routing.layers, sampled)).round().astype(int))
    chosen = draw(routing.at_layers(places.tolist()), lengths, seed)
    return tuple(_counted(routing.name, chosen, list(lengths), routing.experts, each) for each in decodings)


def _drawn(streams: int) -> tuple[int, ...]:
    """Return the lengths of requests that fill the slots of all streams twice, as history and to be judged."""
    many = max(len(DRAWN), 2 * streams)
    return (min(DRAWN[0], MOST_TOKENS // many),) * many


def of_trace(trace: Trace) -> Hits:
    """Return the hits of recorded routing, from at most MOST_TOKENS tokens that have k experts in every layer."""
    return of_trace_at(trace, (PLAIN,))[0]


def of_trace_at(trace: Trace, decodings: Sequence[Decoding]) -> tuple[Hits, ...]:
    """Return the hits of recorded routing for each way to decode. Raises ConfigError for too few requests."""
    ids, offsets = np.asarray(trace.read("chosen")), np.asarray(trace.request_offsets)
    whole = (ids >= 0).all(axis=(1, 2))
    ends = np.concatenate([[0], np.cumsum(whole)])[offsets]
    streams = max(each.streams for each in decodings)
    if streams == 1:
        kept = ids[whole][:MOST_TOKENS]
        lengths = np.diff(np.unique(np.minimum(ends, MOST_TOKENS))).tolist()
    else:
        kept, lengths = _together(ids[whole], np.unique(ends), streams)
    name = trace.header.provenance.model
    return tuple(_counted(name, kept, lengths, trace.geometry.experts, each) for each in decodings)


def _together(ids: np.ndarray, ends: np.ndarray, streams: int) -> tuple[np.ndarray, list[int]]:
    """Return pieces of requests that fill the slots of all streams twice: whole requests, else the halves of each."""
    spans = list(pairwise(ends.tolist()))
    if len(spans) < streams:
        raise ConfigError(
            f"invalid --concurrency {streams}: the trace has {counted(len(spans), 'request')} with k experts in "
            "every layer: expected at least as many requests as streams; `moereplay traces merge` joins traces"
        )
    most = MOST_TOKENS // (2 * streams)
    if len(spans) >= 2 * streams:
        spans = [(first, min(last, first + most)) for first, last in spans[: 2 * streams]]
    else:
        halves = [(first, (first + last) // 2, last) for first, last in spans]
        spans = [(a, min(b, a + most)) for a, b, _ in halves] + [(b, min(c, b + most)) for _, b, c in halves]
    spans = [(first, last) for first, last in spans if first < last]
    return np.concatenate([ids[first:last] for first, last in spans]), [last - first for first, last in spans]


def _counted(routing: str, chosen: np.ndarray, lengths: list[int], experts: int, decoding: Decoding = PLAIN) -> Hits:
    """Count the hits of ids (T, L, k), whose requests have these lengths."""
    half, before = _half(lengths)
    first, last = chosen[:half], chosen[half:]
    found, work = last, None
    if decoding.rows > 1:
        work = _work(chosen, lengths, experts, decoding)
        after = lengths[len(before) :] or [len(last)]
        found = _demanded(last, after, experts, decoding)
    held = {
        LRU: _steady(chosen, first, (lengths, before), experts, "per_layer", decoding),
        GLOBAL_LRU: _steady(chosen, first, (lengths, before), experts, "global", decoding),
        STATIC: _static(first, found, experts),
    }
    return Hits(routing, held, work)


def _work(chosen: np.ndarray, lengths: list[int], experts: int, decoding: Decoding) -> Work:
    """Count the distinct experts of full passes, and how many rows chose each. Raises ConfigError if none is full."""
    layers = chosen.shape[1]
    trace = from_arrays(chosen, _plain(layers, experts, chosen.shape[2]), lengths=lengths)
    name = named_schedule(decoding.passes, decoding.drafts.text, 0)
    plan, demand = schedule(trace, name), demand_of(trace, name)
    full = np.repeat(plan.stop - plan.start == decoding.rows, layers)
    if not full.any():
        raise ConfigError(
            f"no pass has all {decoding.rows} rows of {decoding.streams} streams with {decoding.drafts.many} drafts "
            "each: expected longer requests, or fewer streams or drafts"
        )
    sizes = np.diff(demand.offsets)
    rows, many = np.unique(demand.tokens[np.repeat(full, sizes)], return_counts=True)
    return Work(float(sizes[full].mean()), tuple(zip(rows.tolist(), (many / many.sum()).tolist(), strict=True)))


def _demanded(chosen: np.ndarray, lengths: list[int], experts: int, decoding: Decoding) -> list[np.ndarray]:
    """Return the experts that passes demand of each layer, once per pass."""
    layers = chosen.shape[1]
    trace = from_arrays(chosen, _plain(layers, experts, chosen.shape[2]), lengths=lengths)
    demand = demand_of(trace, named_schedule(decoding.passes, decoding.drafts.text, 0))
    steps = np.repeat(np.arange(len(demand.offsets) - 1), np.diff(demand.offsets))
    return [np.asarray(demand.expert)[steps % layers == layer] for layer in range(layers)]


def _half(lengths: list[int]) -> tuple[int, list[int]]:
    """Return the tokens of the first half of the requests, at least a half of a single one, and their lengths."""
    if len(lengths) == 1:
        return lengths[0] // 2, [lengths[0] // 2]
    before = lengths[: len(lengths) // 2]
    return sum(before), before


def _steady(
    chosen: np.ndarray,
    first: np.ndarray,
    lengths: tuple[list[int], list[int]],
    experts: int,
    scope: str,
    decoding: Decoding,
) -> np.ndarray:
    """Return the hits (POINTS,) of LRU after the first part."""
    whole, history = (
        _lru(from_arrays(ids, _plain(ids.shape[1], experts, ids.shape[2]), lengths=each), scope, decoding)
        for ids, each in ((chosen, lengths[0]), (first, lengths[1]))
    )
    accesses = whole.accesses - history.accesses
    seen = history.compulsory + (whole.compulsory - history.compulsory) / 2
    unseen = (whole.compulsory - history.compulsory) / accesses
    total = chosen.shape[1] * experts
    capacity = whole.capacity
    deeper = np.clip((capacity - seen) / max(1.0, total - seen), 0, 1)
    hits = 1 - (whole.misses - history.misses) / accesses + unseen * deeper
    if decoding.rows > 1:  # a pass at the end of a part has fewer rows, and not the same in both
        hits = np.clip(np.maximum.accumulate(hits), 0, 1)
    return np.interp(np.linspace(0, 1, POINTS), np.concatenate([[0], capacity / total]), np.concatenate([[0], hits]))


class Counted(NamedTuple):
    """Misses of LRU at each capacity."""

    capacity: np.ndarray  #: (G,) experts
    misses: np.ndarray  #: (G,)
    accesses: int
    compulsory: int


def _lru(trace: Trace, scope: str, decoding: Decoding) -> Counted:
    """Count misses. Below one token's demand, where times decide, every access counts as one.

    The demand of a pass of several rows varies. What a capacity cannot hold of it is taken to be what was used first.
    """
    if decoding.rows == 1:
        of = curve(trace, "lru", scope, decoding.passes)
        return Counted(of.capacity_experts, np.where(of.decided, of.misses, of.accesses), of.accesses, of.compulsory)
    layers, experts = trace.geometry.layers, trace.geometry.experts
    cut = Cut(layers, experts, scope == "per_layer", atomic=True)
    counted = tally(layers, cut.units)
    demands = demands_of(trace, named_schedule(decoding.passes, decoding.drafts.text, 0), "never")
    lru.count(demands, cut, np.ones(layers, np.int64), counted, lambda steps: None)
    found = counted.found.sum(0)
    capacity = np.arange(1, cut.units + 1) * (layers if cut.per_layer else 1)
    return Counted(capacity, found.sum() - np.cumsum(found[:-2]), int(found.sum()), int(found[-1]))


def _static(first: np.ndarray, last: np.ndarray | Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Return the hits (POINTS,) of each layer's most used experts of the first part (T, L, k) in the last one.

    `last` is alike, or what its passes demand of each layer.
    """
    layers = first.shape[1]
    demanded = [last[:, layer].ravel() for layer in range(layers)] if isinstance(last, np.ndarray) else last
    held = np.zeros(experts + 1)
    for layer, uses in enumerate(demanded):
        used = np.bincount(first[:, layer].ravel(), minlength=experts)
        found = np.bincount(uses, minlength=experts)
        held[1:] += np.cumsum(found[np.argsort(-used, kind="stable")]) / max(1, found.sum())
    return np.interp(np.linspace(0, 1, POINTS), np.linspace(0, 1, experts + 1), held / layers)


def _plain(layers: int, experts: int, k: int) -> Geometry:
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(1 << 20,) * layers)
