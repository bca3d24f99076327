"""The demand side as arrays: of a trace, memory-mapped where it is on disk, or of any source that is known whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from policies.contract import NONE, UNIT
from simulator.compiled.runtime.initial import Inputs
from simulator.compiled.runtime.layout import FEED
from simulator.config import ReplayConfig
from simulator.errors import ConfigError
from simulator.source import Gate, Pass, Source
from traces import plain, routers
from traces.demand import Demand, demand_of, next_passes
from traces.lookahead import look
from traces.passes import Passes, schedule
from traces.schema import Geometry, Trace
from traces.shared import read_only, shared

#: The demand stream's columns in `traces.demand`.
STREAM = {
    "stream_expert": "expert",
    "stream_rank": "rank",
    "stream_mass": "mass",
    "stream_sum": "mass_sum",
    "stream_tokens": "tokens",
    "stream_next": "next_use",
}


class Demanded(NamedTuple):
    """What decides which arrays of a trace are input, and in what form."""

    passes: str
    scores: bool  #: whether any policy needs the router's logits
    next_pass: bool  #: whether any reads it
    depths: tuple[int, ...]  #: of the look-ahead
    control: tuple[str, int]  #: of the look-ahead, and its seed


def inputs_of(trace: Trace, config: ReplayConfig, needs: frozenset[str], reads: frozenset[str]) -> Inputs:
    """Only the arrays that the policies need; `reads` is what they declare to read. Raises TraceError.

    All replays of this process that want the same share them.
    """
    depths = _depths(config)
    control = (config.lookahead, config.seed if config.lookahead != "recorded" else 0) if depths else ("", 0)
    wanted = Demanded(config.passes, "logits" in needs, "next_pass" in reads, depths, control)
    return shared(trace, wanted, lambda: _inputs_of(trace, wanted))


def _inputs_of(trace: Trace, wanted: Demanded) -> Inputs:
    passes = wanted.passes
    plan, geometry, demand = schedule(trace, passes), trace.geometry, demand_of(trace, passes)
    scores = _scores_of(trace) if wanted.scores else {}
    weights = {"token_weights": plain.rows(trace, "weights")} if "weights" in trace.arrays else {}
    looks = _looks_of(trace, wanted) if wanted.depths else {}
    demanded = _demand(demand)
    if wanted.next_pass:
        demanded["stream_pass"] = next_passes(trace, passes)
    return _filled(
        geometry, _plan(plan) | demanded | {"token_ids": plain.rows(trace, "chosen")} | weights | scores | looks
    )


def _plan(plan: Passes) -> dict[str, np.ndarray]:
    return {
        "pass_start": plan.start,
        "pass_tokens": plan.stop - plan.start,
        "pass_phase": plan.phase.astype(np.int64),
        "pass_request": plan.request,
        "pass_row": _rows(plan.request),
    }


def _rows(request: np.ndarray) -> np.ndarray:
    """Requests numbered in the order of their first passes."""
    _, first, number = np.unique(request, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int64)[number]


def _demand(demand: Demand) -> dict[str, np.ndarray]:
    return {"offsets": demand.offsets} | {name: getattr(demand, field) for name, field in STREAM.items()}


def _scores_of(trace: Trace) -> dict[str, np.ndarray]:
    return {
        "token_logits": plain.rows(trace, "logits"),
        "token_choice": plain.choice(trace),
        "token_scores": look(trace, (0,)).score[0],
        "token_shares": plain.shares(trace),
    }


def _looks_of(trace: Trace, wanted: Demanded) -> dict[str, np.ndarray]:
    order, score = look(trace, wanted.depths, *wanted.control)
    return {"look_order": order, "look_score": score}


def _depths(config: ReplayConfig) -> tuple[int, ...]:
    """How far each row of the look-ahead looks; depth 0 is each layer's own scores."""
    prefetch = config.policy_set().prefetch
    depth = prefetch.policy.depth(prefetch.params)
    return (0,) * depth if prefetch.policy.own_scores(prefetch.params) else tuple(range(1, depth + 1))


def _filled(geometry: Geometry, arrays: dict[str, np.ndarray]) -> Inputs:
    """Every array of `layout.FEED`; one that is absent has no tokens."""
    width = arrays["token_ids"].shape[2]
    lengths = {"layers": geometry.layers, "experts": geometry.experts, "width": width}
    absent = {name: [lengths.get(axis, 0) for axis in axes] for name, (_, axes) in FEED.items()}
    return {
        name: read_only(np.ascontiguousarray(arrays.get(name, np.zeros(absent[name], dtype)), dtype))
        for name, (dtype, _) in FEED.items()
    }


# any source


def inputs_from(source: Source) -> Inputs:
    """A source asked for everything in advance; it must not react to what is made of its gates.

    Raises ConfigError for a pass that is not a slice of one request.
    """
    geometry, passes = source.geometry, list(source.passes())
    if any(len(step.parts()) > 1 or not isinstance(step.at, slice) for step in passes):
        raise ConfigError("a pass is not a slice of one request and phase; replay it with the reference engine")
    gates = [source.gate(step, layer) for step in passes for layer in range(geometry.layers)]
    arrays = _plan_from(passes) | _demand_from(gates, source.pass_of)
    arrays |= _tokens_from(gates, geometry) | _looks_from(gates, geometry)
    if "token_logits" in arrays:
        arrays["token_shares"] = routers.shares(geometry.router, arrays["token_logits"])
    return _filled(geometry, arrays)


def _plan_from(passes: Sequence[Pass]) -> dict[str, np.ndarray]:
    names = ("start", "tokens", "phase", "request")
    columns = {name: np.array([getattr(step, name) for step in passes], np.int64) for name in names}
    return {f"pass_{name}": columns[name] for name in names} | {"pass_row": _rows(columns["request"])}


def _demand_from(gates: Sequence[Gate], pass_of: Callable[[int], int]) -> dict[str, np.ndarray]:
    unions = [gate.demand for gate in gates]
    counts = [len(union.expert) for union in unions]
    columns = {
        name: np.array([value for union in unions for value in getattr(union, field)], FEED[name][0])
        for name, field in STREAM.items()
    }
    columns["stream_pass"] = np.array([pass_of(position) for position in columns["stream_next"].tolist()], np.int64)
    return columns | {"offsets": np.concatenate([[0], np.cumsum(counts)])}


def _tokens_from(gates: Sequence[Gate], geometry: Geometry) -> dict[str, np.ndarray]:
    layers, experts = geometry.layers, geometry.experts
    width = max((len(row) for gate in gates for row in gate.ids), default=geometry.k)
    arrays = {"token_ids": _by_token([gate.ids for gate in gates], layers, width, NONE)}
    if any(gate.mass for gate in gates):
        arrays["token_weights"] = _by_token([gate.mass for gate in gates], layers, width, 0) / UNIT
    for name in ("logits", "choice", "scores"):
        if any(getattr(gate, name) for gate in gates):
            arrays[f"token_{name}"] = _by_token([getattr(gate, name) for gate in gates], layers, experts, 0)
    return arrays


def _looks_from(gates: Sequence[Gate], geometry: Geometry) -> dict[str, np.ndarray]:
    depth = max((len(gate.look_order) for gate in gates), default=0)
    return {
        name: np.stack([_by_token(_at(gates, name, d), geometry.layers, geometry.experts, 0) for d in range(depth)])
        for name in ("look_order", "look_score")
        if depth
    }


def _at(gates: Sequence[Gate], name: str, d: int) -> list[Sequence]:
    """One depth of every gate; a gate that looks less far has none."""
    return [getattr(gate, name)[d] if d < len(gate.look_order) else [()] * len(gate.ids) for gate in gates]


def _by_token(rows: Sequence[Sequence], layers: int, width: int, filler: int) -> np.ndarray:
    """(T, layers, width) of rows that come gate by gate, the layers of a pass one after the other."""
    padded = [[[*row, *[filler] * (width - len(row))] for row in gate] for gate in rows]
    passes = [np.stack(padded[at : at + layers], 1) for at in range(0, len(padded), layers)]
    return np.concatenate(passes) if passes else np.zeros((0, layers, width))
