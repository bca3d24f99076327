"""The load of a machine: a model as stored, its memory, how requests decode, and routing to replay.

A model without a trace gets routing that is drawn from routing models and kept in the user's cache. Of every routing
the first part is history, from which fixed placements are made and caches are filled; the rest is replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from moereplay.results.remarks import SYNTHETIC
from moereplay.simulator.capacity import CONTEXT, RUNTIME, size_of, sized
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.recommend.decoding import PLAIN, Asked, Decoding, asked
from moereplay.sweeps.recommend.space import Experts
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.dense import assumption, dense_of, recorded
from moereplay.traces.drafts import OFF
from moereplay.traces.files import forget_unused, private_folder, scratch_beside
from moereplay.traces.geometry import KnownModel, as_known, recognised
from moereplay.traces.recorder import memory_trace
from moereplay.traces.routing import Candidate, as_toml, draw, draws, routings_for
from moereplay.traces.schema import Geometry, Header, Provenance, Request, Trace, TraceError, shown
from moereplay.traces.store import open_trace
from moereplay.traces.summary import synthetic
from moereplay.traces.texts import counted, size

HISTORY, REPLAYED = 128, 192  #: tokens of a drawn routing, before and in the replay
MOST_TOKENS = 2_048  #: of a recorded trace, history included
DIGEST = 32  #: bytes of a sha256
KEPT_SECONDS = 30 * 86_400.0  #: of drawn routing, without use
UBATCH = 512  #: rows of a prompt whose logits an engine holds at once (llama.cpp's default -ub)
SMALLER_BY = 0.95  #: of the bytes of the one before
ACTIVATIONS = 8  #: rows of the width of the residual that a graph holds at once: a layer's inputs, parts and sums
SMALLER = ("Q4_K_M", "Q3_K_M", "Q2_K")  #: quantisations that are offered in place of a larger one
#: Formats of the KV cache by their bits: blocks of 32 numbers share a scale of 16 bits.
KV_FORMATS = {16: ("f16", 16.0), 8: ("q8_0", 8.5), 4: ("q4_0", 4.5)}
OWN, OTHERS, RECORDED = "the model's own routing", "other models' routing", "recorded routing"


@dataclass(frozen=True)
class Options:
    """Options that describe the load; empty texts and None are assumed."""

    context: int | None = None
    runtime: str = ""
    dense: str = ""
    dense_bits: str = ""
    quant: str = ""
    kv_bits: int = 16
    concurrency: int | None = None
    draft: str = OFF


def middle(many: int) -> int:
    """Return which of so many routings, in their order, settings are compared at."""
    return (many - 1) // 2


@dataclass(frozen=True, eq=False)
class Routing:
    """One routing: ids of the experts that were chosen, (T, L, k), before the replay and in it."""

    name: str
    history: np.ndarray
    ids: np.ndarray
    lengths: tuple[int, ...]  #: tokens of the requests that are replayed
    made: str = ""  #: how it was drawn, "" if it was recorded

    def order(self, geometry: Geometry) -> Experts:
        """Return all experts (layer, expert), those first that history used most."""
        pairs = np.arange(geometry.layers * geometry.experts)
        uses = np.zeros((geometry.layers, geometry.experts), np.int64)
        for layer in range(geometry.layers):
            chosen = self.history[:, layer].ravel()
            uses[layer] = np.bincount(chosen[chosen >= 0], minlength=geometry.experts)
        layers, experts = np.divmod(pairs[np.argsort(-uses.ravel(), kind="stable")], geometry.experts)
        return tuple(zip(layers.tolist(), experts.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Load:
    """A model as stored, its context and memory, how it decodes, and its routings."""

    name: str  #: with the quantisation and the size, for people
    model: str  #: its name, "" if engines are not asked whether they run it
    geometry: Geometry
    context: int  #: positions of each stream
    kv_bits: int
    runtime_bytes: int
    buffer_bytes: int  #: of a prompt's rows: logits and activations
    routings: tuple[Routing, ...]
    grade: str  #: how well its routing is known
    source: str  #: of the routing
    assumed: tuple[str, ...]
    known: KnownModel | None = None
    decoding: Decoding = PLAIN
    asked: Asked | None = None  #: about drafts and streams

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.geometry.total_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of dense weights in memory; 0 if they are unknown."""
        return dense_of(self.geometry).resident

    @property
    def table_bytes(self) -> int:
        """Bytes of an embedding table among the dense weights."""
        return dense_of(self.geometry).table

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV caches of all streams."""
        return round(self.decoding.streams * self.geometry.kv_held(self.context) * self.kv_share)

    @property
    def kv_share(self) -> float:
        """Bytes of the KV cache over those at 16 bits."""
        return KV_FORMATS[self.kv_bits][1] / 16

    @property
    def head_bytes(self) -> int:
        """Bytes of a layer that drafts, with its experts; 0 without one."""
        return head_bytes(self.geometry, self.decoding)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the fast memory of one card that are not for experts."""
        return sum(self.fixed().values())

    def fixed(self, cards: int = 1, prompt_bytes: int = 0, table_below: bool = False) -> dict[str, int]:
        """Return the bytes of fast memory that are not for experts.

        `prompt_bytes` of each card are for prompts; `table_below`: the embedding table is in main memory.
        """
        return {
            "dense weights": self.dense_bytes - self.table_bytes * table_below,
            "KV cache": self.kv_bytes,
            "draft layer": self.head_bytes,
            "compute buffers": (self.buffer_bytes + prompt_bytes) * cards,
            "runtime": self.runtime_bytes * cards,
        }

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """What is replayed of each routing."""
        return tuple(memory_trace(*self.content(at)) for at in range(len(self.routings)))

    def content(self, at: int) -> tuple[Header, list[Request]]:
        """Return what is replayed of a routing, to be written as a trace."""
        routing = self.routings[at]
        about = Provenance(model=self.model or Provenance().model, synthetic=routing.made)
        ends = [0, *accumulate(routing.lengths)]
        requests = [Request(routing.ids[first:last], 0) for first, last in pairwise(ends)]
        return Header(geometry=self.geometry, provenance=about), requests

    @cached_property
    def orders(self) -> tuple[Experts, ...]:
        """All experts by routing, those first that its history used most."""
        return tuple(routing.order(self.geometry) for routing in self.routings)

    def at(self, decoding: Decoding) -> Load:
        """Return the load that decodes in another way, with as many requests in its routings as it has streams."""
        routings = tuple(_together(routing, decoding.streams) for routing in self.routings)
        return replace(self, decoding=decoding, routings=routings)


def head_bytes(geometry: Geometry, decoding: Decoding) -> int:
    """Return the bytes of a layer that drafts, with its experts; 0 without one."""
    if not decoding.drafts_by_layer:
        return 0
    return geometry.experts * geometry.expert_bytes[-1] + dense_of(geometry).layers[-1]


def smaller_loads(spec: str, options: Options) -> Iterator[tuple[str, Load]]:
    """Yield the same model in smaller quantisations, by name, the largest first."""
    whole = model_load(spec, options)
    before = whole.expert_bytes
    for quant in SMALLER:
        with suppress(TraceError, ConfigError):
            load = model_load(spec, replace(options, quant=quant))
            if load.expert_bytes < SMALLER_BY * before:
                before = load.expert_bytes
                yield f"{quant} ({size(load.expert_bytes + load.dense_bytes)})", load


def model_load(spec: str, options: Options) -> Load:
    """Return the load of a model. Raises TraceError or ConfigError."""
    model = model_of(spec, options.quant)
    cached = {"kv_bytes": model.kv_bytes, "kv_windows": model.kv_windows}
    geometry = sized(model.geometry.model_copy(update=cached), model.name, options.dense, options.dense_bits)
    candidates = routings_for(model.name, geometry)
    own = candidates[0].own
    names = ", ".join(candidate.name for candidate in candidates)
    source = f"routing model{'s' if len(candidates) > 1 else ''} {names}"
    if not own:
        source = f"no recording of this model's routing: {names}, a range that docs/routing.md measures"
    stored = f", {options.quant.upper()}" if options.quant else f", experts at {geometry.mean_bits:.4g} bits"
    load = _load(options, geometry, model.name, f"{shown(model.name)}{stored}", recognised(model.name) or model)
    assumed = (*load.assumed, *filter(None, (model.note if options.quant else "", model.assumed)))
    if model.table_params:
        assumed = (*assumed, "tables of n-grams are in no sum: they are read by the row, from RAM or the disk")
    if 0 < model.context < load.context:
        assumed = (*assumed, f"a longer context than the {model.context:,} positions that the model was made for")
    return replace(
        load,
        known=model,
        routings=_drawn(candidates, _streams(load)),
        assumed=assumed,
        grade=f"estimated with {OWN if own else OTHERS}",
        source=source,
    )


def load_of(model: str, geometry: Geometry, context: int) -> Load:
    """Return the load of a geometry that stands in no file, with the middle routing for a model of its name."""
    load = _load(Options(context=context), geometry, model, model, recognised(model, geometry))
    candidates = routings_for(model, geometry)
    return replace(load, routings=_drawn([candidates[middle(len(candidates))]], 1))


def trace_load(path: Path, options: Options) -> Load:
    """Return the load of a trace's model under its routing. Raises TraceError or ConfigError."""
    trace = open_trace(path)
    about = trace.header.provenance
    geometry = sized(as_known(trace.geometry, about.model), about.model, options.dense, options.dense_bits)
    load = _load(options, geometry, about.model, shown(about.model), recognised(about.model, geometry))
    assumed = (*load.assumed, *filter(None, [assumption(geometry, recorded(about))]))
    grade, source = grade_of("estimated", trace)
    return replace(load, routings=(_recorded(trace, _streams(load)),), grade=grade, source=source, assumed=assumed)


def grade_of(seconds: str, trace: Trace) -> tuple[str, str]:
    """Return what an answer from a trace rests on, and whose routing it is."""
    made = synthetic(trace.header.provenance)
    whose = made or f"{counted(trace.tokens, 'token')} of {counted(trace.requests, 'request')}"
    return f"{seconds} with {SYNTHETIC if made else RECORDED}", whose


def _streams(load: Load) -> int:
    return load.asked.streams if load.asked else 1


def _load(options: Options, geometry: Geometry, model: str, name: str, known: KnownModel | None) -> Load:
    """Return the load without routing."""
    drafts = asked(options.concurrency, options.draft, model)
    geometry.refuse_uneven("recommend")
    load = Load(
        name=name,
        model=model,
        geometry=geometry,
        context=CONTEXT if options.context is None else options.context,
        kv_bits=options.kv_bits,
        runtime_bytes=size_of(options.runtime, "runtime") if options.runtime else RUNTIME,
        buffer_bytes=_buffers(geometry, known),
        routings=(),
        grade="",
        source="",
        assumed=(),
        known=known,
        decoding=drafts.at(0) if drafts else PLAIN,
        asked=drafts,
    )
    assumed = assumed_parts(options.context, options.runtime)
    if not (options.dense or options.dense_bits or options.quant) and not geometry.dense_bytes:
        assumed.append(
            f"dense weights at {geometry.dense_bits:g} bits, {size(load.dense_bytes)} (--dense, --dense-bits)"
        )
    return replace(load, name=f"{name} ({size(load.expert_bytes + load.dense_bytes)} in all)", assumed=tuple(assumed))


def assumed_parts(context: int | None, runtime: str) -> list[str]:
    """Return the parts of a memory that are assumed, with the options that replace them."""
    said = [] if context is not None else [f"a context of {CONTEXT:,} positions (--context)"]
    return said if runtime else [*said, f"{size(RUNTIME)} of runtime (--runtime)"]


def _buffers(geometry: Geometry, known: KnownModel | None) -> int:
    """Return the bytes of UBATCH rows of a prompt: logits of the vocabulary and some activations, four bytes each."""
    hidden = known.hidden if known else geometry.hidden
    if not hidden:
        return 0
    vocabulary = (geometry.head_params or 0) // hidden
    return 4 * UBATCH * (vocabulary + ACTIVATIONS * hidden)


# -- routing


def _drawn(candidates: Sequence[Candidate], streams: int) -> tuple[Routing, ...]:
    """Draw routings of one shape, or read those that were drawn before."""
    lengths = _lengths(HISTORY, streams) + _lengths(REPLAYED, streams)
    many = len(lengths) // 2
    models = [candidate.routing for candidate in candidates]
    keys = [hashlib.sha256(f"{as_toml(model)} {lengths}".encode()).hexdigest()[:32] for model in models]
    texts = [_kept(key) for key in keys]
    if any(ids is None for ids in texts):
        alike = len({(model.zipf, model.recur) for model in models}) == 1
        texts = draws(models, lengths) if alike else [draw(model, lengths) for model in models]
        for key, ids in zip(keys, texts, strict=True):
            _keep(key, ids)
    first, found = sum(lengths[:many]), zip(candidates, texts, strict=True)
    return tuple(
        Routing(candidate.name, ids[:first], ids[first:], lengths[many:], f"routing model {candidate.name}")
        for candidate, ids in found
        if ids is not None
    )


def _lengths(tokens: int, streams: int) -> tuple[int, ...]:
    """Return the lengths of two requests, or of one for each stream, that have about so many tokens together."""
    many = max(2, streams)
    return (max(8, tokens // many),) * many


def _kept(key: str) -> np.ndarray | None:
    """Return a drawn routing of the user's cache; None if it is not there, or is damaged."""
    with suppress(OSError, ValueError, EOFError):
        content = (private_folder("routings") / key).read_bytes()
        if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
            return np.load(BytesIO(content[DIGEST:]), allow_pickle=False)
    return None


def _keep(key: str, ids: np.ndarray) -> None:
    with suppress(OSError):  # nothing can be written there
        folder = private_folder("routings")
        forget_unused(folder, "*", KEPT_SECONDS)
        np.save(content := BytesIO(), ids)
        scratch = scratch_beside(folder / key)
        scratch.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
        scratch.replace(folder / key)


def _recorded(trace: Trace, streams: int) -> Routing:
    """Return the first tokens of a trace with k experts in every layer. Raises ConfigError for too few requests."""
    ids, offsets = np.asarray(trace.read("chosen")), np.asarray(trace.request_offsets)
    whole = (ids >= 0).all(axis=(1, 2))
    ends = np.unique(np.concatenate([[0], np.cumsum(whole)])[offsets])
    ids = ids[whole]
    spans = list(pairwise(ends.tolist()))
    if len(spans) < streams:
        raise ConfigError(
            f"invalid --concurrency {streams}: the trace has {counted(len(spans), 'request')} with k experts in "
            "every layer: expected at least as many requests as streams; `moereplay traces merge` joins traces"
        )
    if len(spans) < 2 * streams:  # the halves of each
        spans = [
            part
            for first, last in spans
            for part in ((first, (first + last) // 2), ((first + last) // 2, last))
            if part[0] < part[1]
        ]
        spans = spans[::2] + spans[1::2]
    most = max(1, MOST_TOKENS // max(2, 2 * streams))
    spans = [(first, min(last, first + most)) for first, last in spans[: max(2, 2 * streams, MOST_TOKENS // most)]]
    many = max(1, len(spans) // 2)
    history, replayed = spans[:many], spans[many:] or spans
    return Routing(
        trace.header.provenance.model,
        np.concatenate([ids[first:last] for first, last in history]),
        np.concatenate([ids[first:last] for first, last in replayed]),
        tuple(last - first for first, last in replayed),
        synthetic(trace.header.provenance),
    )


def _together(routing: Routing, streams: int) -> Routing:
    """Return a routing whose replayed part has at least as many requests as streams: a longer one is cut."""
    many = len(routing.lengths)
    if many >= streams:
        return routing
    tokens = sum(routing.lengths)
    lengths = tuple(tokens // streams + (at < tokens % streams) for at in range(streams))
    return replace(routing, lengths=lengths)
