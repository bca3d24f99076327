"""The subject of a recommendation: a model or a trace as the load of the closed form, with the quality of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.simulator.capacity import CONTEXT, RUNTIME, size_of, sized
from moereplay.sweeps.recommend.drafting import Asked as AskedDrafts
from moereplay.sweeps.recommend.drafting import asked as asked_drafts
from moereplay.sweeps.recommend.hits import PLAIN, Decoding, Hits, of_model_at, of_trace_at
from moereplay.sweeps.recommend.token_time import Load
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.dense import assumption, dense_of, recorded
from moereplay.traces.drafts import OFF
from moereplay.traces.geometry import as_known
from moereplay.traces.routing import routings_for
from moereplay.traces.schema import Geometry, shown
from moereplay.traces.store import open_trace
from moereplay.traces.summary import synthetic
from moereplay.traces.texts import counted, size

OWN, OTHERS, RECORDED = "the model's own routing", "other models' routing", "recorded routing"


class Asked(NamedTuple):
    """Options that describe the load; empty texts and None are assumed."""

    context: int | None = None
    runtime: str = ""
    dense: str = ""
    dense_bits: str = ""
    quant: str = ""
    concurrency: int | None = None
    draft: str = OFF


class Subject(NamedTuple):
    """A load, its name, and how well its routing is known."""

    load: Load  #: of one stream without drafts
    name: str
    grade: str
    routing: str
    assumed: tuple[str, ...]
    drafts: AskedDrafts | None  #: streams and drafts, where they are asked about
    loads: tuple[Load, ...]  #: and the load of each of its decodings

    def about(self) -> dict[str, Any]:
        """Return the fields of the document."""
        return {name: getattr(self, name) for name in ("name", "grade", "routing", "assumed")} | {
            "routings": [each.routing for each in self.load.hits]
        }


def model_load(spec: str, asked: Asked) -> Subject:
    """Return the load of a model. Raises TraceError or ConfigError."""
    model = model_of(spec, asked.quant)
    cached = {"kv_bytes": model.kv_bytes, "kv_windows": model.kv_windows}
    geometry = sized(model.geometry.model_copy(update=cached), model.name, asked.dense, asked.dense_bits)
    candidates = routings_for(model.name, geometry)
    own = candidates[0].own
    names = ", ".join(each.name for each in candidates)
    routing = f"routing model{'s' if len(candidates) > 1 else ''} {names}"
    if not own:
        routing = "no recording of this model's routing: the range is that of generic routing (--json names it)"
    drafts = asked_drafts(asked.concurrency, asked.draft, model.name)
    ways = drafts.decodings if drafts else (PLAIN,)
    loads = _loads(geometry, model.name, asked, ways, [of_model_at(each.routing, ways) for each in candidates])
    load = loads[0]
    stored = f", {asked.quant.upper()}" if asked.quant else f", experts at {geometry.mean_bits:.4g} bits"
    name = f"{shown(model.name)}{stored} ({size(load.expert_bytes + load.dense_bytes)})"
    assumed = _assumed(load, asked)
    assumed += tuple(filter(None, (model.note if asked.quant else "", model.assumed)))
    if 0 < model.context < load.context:
        assumed = (*assumed, f"a longer context than the {model.context:,} positions that the model was made for")
    return Subject(load, name, f"estimated with {OWN if own else OTHERS}", routing, assumed, drafts, loads)


def trace_load(path: Path, asked: Asked) -> Subject:
    """Return the load of a trace's model under its routing. Raises TraceError or ConfigError."""
    trace = open_trace(path)
    about = trace.header.provenance
    geometry = sized(as_known(trace.geometry, about.model), about.model, asked.dense, asked.dense_bits)
    drafts = asked_drafts(asked.concurrency, asked.draft, about.model)
    ways = drafts.decodings if drafts else (PLAIN,)
    loads = _loads(geometry, about.model, asked, ways, [of_trace_at(trace, ways)])
    load = loads[0]
    made = synthetic(about)
    routing = made or f"{counted(trace.tokens, 'token')} of {counted(trace.requests, 'request')}"
    name = f"{shown(about.model)} ({size(load.expert_bytes + load.dense_bytes)})"
    told = assumption(geometry, recorded(about))
    assumed = (*_assumed(load, asked), *([told] if told else []))
    grade = f"estimated with {'synthetic routing' if made else RECORDED}"
    return Subject(load, name, grade, routing, assumed, drafts, loads)


def _loads(
    geometry: Geometry, model: str, asked: Asked, ways: Sequence[Decoding], hits: Sequence[Sequence[Hits]]
) -> tuple[Load, ...]:
    """Return the load of each way to decode, from the hits of each routing in these ways."""
    runtime = size_of(asked.runtime, "runtime") if asked.runtime else RUNTIME
    context = CONTEXT if asked.context is None else asked.context
    each = zip(ways, zip(*hits, strict=True), strict=True)
    return tuple(Load(geometry, context, runtime, of, model, decoding) for decoding, of in each)


def _assumed(load: Load, asked: Asked) -> tuple[str, ...]:
    """Return the assumptions about the load, each with the option that replaces it."""
    found = []
    if asked.context is None:
        found.append(f"a context of {CONTEXT:,} positions (--context)")
    if not asked.runtime:
        found.append("500 MB of runtime (--runtime)")
    if not (asked.dense or asked.dense_bits or asked.quant) and not load.geometry.dense_bytes:
        resident = dense_of(load.geometry).resident
        found.append(f"dense weights at {load.geometry.dense_bits:g} bits, {size(resident)} (--dense, --dense-bits)")
    return tuple(found)
