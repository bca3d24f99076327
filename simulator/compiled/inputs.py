"""Input arrays of a replay, from a trace (mapped from disk) or from a source, and tables of times from a platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from moereplay.policies.contract import NONE, UNIT, Prefetch
from moereplay.policies.grammar import Chosen, parse
from moereplay.simulator.compiled.layout import ARRAYS, INPUT_ARRAYS, depends_on_time
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.interface import RunSpec
from moereplay.simulator.source import Gate, Pass, Source
from moereplay.simulator.times import BATCH_TABLES, Times
from moereplay.traces import routers, token_arrays
from moereplay.traces.demand import demand_of, next_passes
from moereplay.traces.derived import derived, read_only, shared
from moereplay.traces.drafts import KNOWN
from moereplay.traces.drafts import Rows as PassRows
from moereplay.traces.growing import VALUES_AT_ONCE, Growing, Rows, append
from moereplay.traces.passes import Passes, is_long, schedule, slots_of
from moereplay.traces.schema import Geometry, Trace
from moereplay.traces.token_arrays import look

#: Columns of the demand stream, by input array, in `traces.demand`.
STREAM = {
    "stream_expert": "expert",
    "stream_rank": "rank",
    "stream_mass": "mass",
    "stream_sum": "mass_sum",
    "stream_tokens": "tokens",
    "stream_next": "next_use",
}


#: Arrays of a long trace's passes that are kept on disk, in addition to those of `traces/passes.py`.
KEPT = {
    name: Rows(np.dtype(INPUT_ARRAYS[name][0]).str)
    for name in ("pass_tokens", "pass_phase", "pass_position", "pass_apart")
}


#: Marks of a course (fast_path.py) at most; memory is taken as it fills.
MOST_MARKS = 1 << 25


class Addressed(dict[str, np.ndarray]):
    """Arrays by the names of `layout`, which several replays read: numpy takes a microsecond to tell an address."""

    @cached_property
    def addresses(self) -> dict[str, int]:
        """The address of each array."""
        return {name: array.ctypes.data for name, array in self.items()}

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The lengths of the arrays by the names of `layout`; an array that is absent has length 0."""
        found = dict[str, int]()
        for name, array in self.items():
            for axis, length in zip((ARRAYS | INPUT_ARRAYS)[name][1], array.shape, strict=True):
                found[axis] = max(found.get(axis, 0), length)
        return found


Inputs = Addressed  #: by the names of `layout.INPUT_ARRAYS`


class Demanded(NamedTuple):
    """Settings that decide which arrays of a trace are input, and in which form."""

    passes: str
    scores: bool  #: a policy needs the router's logits
    next_pass: bool  #: a policy reads the pass of the next use
    depths: tuple[int, ...]  #: look-ahead distances
    control: tuple[str, int]  #: look-ahead control and its seed
    arriving: int  #: requests that arrive over time: their shares of passes are input, not passes and demand


def inputs_of(
    trace: Trace, config: ReplayConfig, needs: frozenset[str], reads: frozenset[str], arriving: int = 0
) -> Inputs:
    """Return the arrays that the policies need; `reads` is the set that they declare. Raises TraceError.

    `arriving`: so many requests arrive over time; the trace begins anew after its last.

    All replays of this process with the same requirements share the arrays.
    """
    depths = _depths(config)
    control = (config.lookahead, config.seed if config.lookahead != "recorded" else 0) if depths else ("", 0)
    slots = slots_of(config.schedule) if arriving else None
    passes = slots.alone if slots else config.schedule
    wanted = Demanded(passes, "logits" in needs, "next_pass" in reads, depths, control, arriving)
    return shared(trace, wanted, lambda: _inputs_of(trace, wanted))


def _inputs_of(trace: Trace, wanted: Demanded) -> Inputs:
    # arrays of long traces are memory-mapped; `_filled` makes the absent ones empty
    plan = schedule(trace, wanted.passes)
    arrays = _shares(plan.repeated(wanted.arriving)) if wanted.arriving else _known_passes(trace, wanted, plan)
    arrays |= {"token_ids": token_arrays.rows(trace, "chosen")}
    if "row_token" in arrays:
        arrays["token_assigned"], arrays["token_mass"] = token_arrays.sums(trace)
    if "weights" in trace.arrays:
        arrays["token_weights"] = token_arrays.rows(trace, "weights")
    if wanted.scores:
        arrays |= _scores_of(trace)
    if wanted.depths:
        arrays["look_order"], arrays["look_score"] = look(trace, wanted.depths, *wanted.control)
    return _filled(trace.geometry, arrays)


def _known_passes(trace: Trace, wanted: Demanded, plan: Passes) -> dict[str, np.ndarray]:
    """Return passes that are known before the run, and their demand."""
    demand = demand_of(trace, wanted.passes)
    arrays = _plan_of(trace, wanted.passes, plan) | {"offsets": demand.offsets}
    arrays |= {name: getattr(demand, field) for name, field in STREAM.items()}
    return arrays | ({"stream_pass": next_passes(trace, wanted.passes)} if wanted.next_pass else {})


def _shares(plan: Passes) -> dict[str, np.ndarray]:
    """Return the passes of requests that are alone as their shares of passes."""
    arrays = _plan(plan)
    return {
        "requests": arrays["requests"],
        "first_share": np.searchsorted(arrays["pass_number"], np.arange(len(arrays["requests"]) + 1)),
        "share_start": np.append(plan.start, plan.stop[-1:]),
        **{f"share_{name}": getattr(plan.every_row, name) for name in ("token", "reads", "phase", "draft")},
    }


def _plan_of(trace: Trace, passes: str, plan: Passes) -> dict[str, np.ndarray]:
    """Return the passes as arrays. Those of a long trace with requests in sequence are kept on disk."""
    if plan.rows is not None or not is_long(len(plan)):
        return _plan(plan)

    def fill(arrays: Mapping[str, Growing]) -> None:
        for first in range(0, len(plan), VALUES_AT_ONCE):
            _add_passes(trace, plan, slice(first, first + VALUES_AT_ONCE), arrays)

    numbers = {"pass_request": plan.request, "pass_number": plan.request, "requests": np.arange(trace.requests)}
    return {"pass_start": plan.start} | numbers | derived(trace, f"plan-{passes}", KEPT, fill)


def _add_passes(trace: Trace, plan: Passes, part: slice, arrays: Mapping[str, Growing]) -> None:
    start, request, before = plan.start[part], plan.request[part], plan.request[max(part.start - 1, 0)]
    append(arrays["pass_tokens"], plan.stop[part] - start)
    append(arrays["pass_phase"], plan.phase[part])
    append(arrays["pass_position"], start - trace.request_offsets[request])
    append(arrays["pass_apart"], np.diff(request, prepend=before) != 0)


def _plan(plan: Passes) -> dict[str, np.ndarray]:
    start, rows = plan.start, plan.rows
    requests, token = (plan.request, start) if rows is None else (rows.request, rows.token)  # of every row
    leaders = np.arange(len(plan)) if rows is None else start
    numbers, first = _numbered(requests)
    arrays = {
        "pass_start": start,
        "pass_tokens": plan.stop - start,
        "pass_phase": plan.phase,
        "pass_request": plan.request,
        "pass_number": numbers[leaders],
        "pass_position": (token - token[first][numbers])[leaders],
        "pass_apart": plan.apart(),
        "requests": requests[first],
    }
    if rows is not None and rows.draft.any():
        arrays["pass_drafts"] = np.add.reduceat(rows.draft != KNOWN, start)
    return arrays if rows is None else arrays | _rows(rows, numbers, plan)


def _numbered(requests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number requests by first occurrence: return each row's number, and each number's first row."""
    _, first, number = np.unique(requests, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return np.argsort(order)[number], first[order]


def _rows(rows: PassRows, numbers: np.ndarray, plan: Passes) -> dict[str, np.ndarray]:
    passes = np.repeat(np.arange(len(plan)), plan.stop - plan.start)
    parts = (passes * (numbers.max(initial=0) + 1) + numbers) * 2 + rows.phase
    opens = np.zeros(len(parts), np.int64)
    opens[np.unique(parts, return_index=True)[1]] = 1
    columns = {"row_token": rows.token, "row_reads": rows.reads, "row_phase": rows.phase, "row_draft": rows.draft}
    return columns | {"row_number": numbers, "row_opens": opens}


def _scores_of(trace: Trace) -> dict[str, np.ndarray]:
    return {
        "token_logits": token_arrays.rows(trace, "logits"),
        "token_choice": token_arrays.choice(trace),
        "token_scores": look(trace, (0,)).score[0],
        "token_shares": token_arrays.shares(trace),
    }


def _depths(config: ReplayConfig) -> tuple[int, ...]:
    """Return the look-ahead distance of each row; distance 0 is each layer's own scores."""
    prefetch: Chosen[Prefetch] = parse("prefetch", config.prefetch)
    depth = prefetch.policy.depth(prefetch.params)
    return (0,) * depth if prefetch.policy.own_scores(prefetch.params) else tuple(range(1, depth + 1))


def _filled(geometry: Geometry, arrays: dict[str, np.ndarray]) -> Inputs:
    """Return every array of `layout.INPUT_ARRAYS`, empty where it is absent."""
    width = arrays["token_ids"].shape[2]
    lengths = {"layers": geometry.layers, "experts": geometry.experts, "width": width}
    absent = {name: [lengths.get(axis, 0) for axis in axes] for name, (_, axes) in INPUT_ARRAYS.items()}
    return Addressed(
        {
            name: read_only(np.ascontiguousarray(arrays.get(name, np.zeros(absent[name], dtype)), dtype))
            for name, (dtype, _) in INPUT_ARRAYS.items()
        }
    )


# inputs from any source


def inputs_from(source: Source, arrive: bool = False) -> Inputs:
    """Read a source completely in advance; its gates must not depend on earlier results.

    `arrive`: its passes are shares of requests that arrive over time.
    """
    geometry, passes = source.geometry, list(source.passes())
    gates = [source.gate(step, layer) for step in passes for layer in range(geometry.layers)]
    plan = _plan_from(passes)
    arrays = _shares(plan) if arrive else _plan(plan) | _demand_from(gates, source.pass_of)
    arrays |= _tokens_from(gates, geometry, plan) | _looks_from(gates, geometry, plan)
    if "token_logits" in arrays:
        arrays["token_shares"] = routers.shares(geometry.router, arrays["token_logits"])
    return _filled(geometry, arrays)


def _plan_from(passes: Sequence[Pass]) -> Passes:
    rows = [row for step in passes for row in step.rows]
    names = {name: "routed" if name == "reads" else name for name in PassRows._fields}
    columns = {column: np.array([getattr(row, name) for row in rows], np.int64) for column, name in names.items()}
    return Passes.of_rows(np.array([step.tokens for step in passes], np.int64), PassRows(**columns))


def _demand_from(gates: Sequence[Gate], pass_of: Callable[[int], int]) -> dict[str, np.ndarray]:
    unions = [gate.demand for gate in gates]
    counts = [len(union.expert) for union in unions]
    columns = {
        name: np.array([value for union in unions for value in getattr(union, field)], INPUT_ARRAYS[name][0])
        for name, field in STREAM.items()
    }
    columns["stream_pass"] = np.array([pass_of(position) for position in columns["stream_next"].tolist()], np.int64)
    return columns | {"offsets": np.concatenate([[0], np.cumsum(counts)])}


def _tokens_from(gates: Sequence[Gate], geometry: Geometry, plan: Passes) -> dict[str, np.ndarray]:
    layers, experts = geometry.layers, geometry.experts
    width = max((len(row) for gate in gates for row in gate.ids), default=geometry.k)
    by_token = partial(_by_token, plan, layers)
    arrays = {"token_ids": by_token([gate.ids for gate in gates], width, NONE)}
    if any(gate.mass for gate in gates):
        arrays["token_weights"] = by_token([gate.mass for gate in gates], width, 0) / UNIT
    for name in ("logits", "choice", "scores"):
        if any(getattr(gate, name) for gate in gates):
            arrays[f"token_{name}"] = by_token([getattr(gate, name) for gate in gates], experts, 0)
    return arrays


def _looks_from(gates: Sequence[Gate], geometry: Geometry, plan: Passes) -> dict[str, np.ndarray]:
    depth = max((len(gate.look_order) for gate in gates), default=0)
    by_token = partial(_by_token, plan, geometry.layers)
    return {
        name: np.stack([by_token(_at(gates, name, d), geometry.experts, 0) for d in range(depth)])
        for name in ("look_order", "look_score")
        if depth
    }


def _at(gates: Sequence[Gate], name: str, d: int) -> list[Sequence]:
    """Return one depth of every gate, empty for gates with less look-ahead."""
    return [getattr(gate, name)[d] if d < len(gate.look_order) else [()] * len(gate.ids) for gate in gates]


def _by_token(plan: Passes, layers: int, rows: Sequence[Sequence], width: int, filler: int) -> np.ndarray:
    """Return (T, layers, width) from rows that are ordered by gate, with the layers of a pass in sequence."""
    padded = [[[*row, *[filler] * (width - len(row))] for row in gate] for gate in rows]
    passes = [np.stack(padded[at : at + layers], 1) for at in range(0, len(padded), layers)]
    found = np.concatenate(passes) if passes else np.zeros((0, layers, width))
    if plan.rows is None:
        return found
    tokens = np.full((int(plan.rows.reads.max()) + 1, layers, width), filler, found.dtype)
    tokens[plan.rows.reads] = found
    return tokens


# tables of durations, from a platform


def costs_of(inputs: Inputs, spec: RunSpec, decided: bool = True) -> Addressed:
    """Return tables of the durations in `simulator.times.Times`, ns: a row per pass length and weights of an expert.

    Dense parts include the time of the policies' decisions, if `decided`.
    """
    times, layout = spec.times, spec.layout
    counted = pass_lengths(inputs, spec)
    shape = layout.geometry.layers, len(layout.tiers[0]), layout.precisions
    known, decided = _by_length(times, *shape, counted.tobytes()), decided and times.has_decisions
    if not (decided or times.reads_kv):
        return known
    changed = dict(known)
    if decided:
        ns = [[spec.decision_ns(layer, int(length)) for layer in range(shape[0])] for length in np.flatnonzero(counted)]
        charged = np.array(ns, np.int64).reshape(-1, shape[0])
        changed |= {name: known[name] + charged for name in ("dense_ns", "slow_dense_ns")}
    return Addressed(changed | _kv(inputs, spec))


@lru_cache(maxsize=8)
def _by_length(times: Times, layers: int, rows: int, precisions: int, counted: bytes) -> Addressed:
    """Return `costs_of` as far as they depend on the machine and the model alone, for all replays of these lengths."""
    lengths = np.frombuffer(counted, bool)
    tokens, slow = len(lengths) - 1, times.slows_compute
    copies = [(row, p) for row in range(rows) for p in range(precisions)]
    weights = [times.weights(*copy) for copy in copies]
    first = dict(zip(reversed(weights), reversed(copies), strict=True))
    places = {each: row for row, each in enumerate(dict.fromkeys(weights))}
    kinds = [first[each] for each in places]
    experts = _per_tokens(times.expert_ns, kinds, tokens)
    found = {
        "dense_ns": _dense(times, np.flatnonzero(lengths), layers, contended=False),
        "slow_dense_ns": _dense(times, np.flatnonzero(lengths), layers, contended=slow),
        "dense_row": np.cumsum(lengths) - 1,
        "load_ns": np.array(times.load_ns, np.int64).ravel(),
        "cost_row": np.array([places[each] for each in weights], np.int64),
        "expert_ns": experts,
        "slow_expert_ns": _per_tokens(partial(times.expert_ns, contended=True), kinds, tokens) if slow else experts,
        "cpu_ns": _per_tokens(times.cpu_ns, kinds, tokens if times.has_cpu else -1),
        "slow_cpu_ns": _per_tokens(partial(times.cpu_ns, contended=True), kinds, tokens if times.has_cpu else -1),
        "wire_ns": np.array(times.wire_ns, np.int64).ravel(),
        "slow_wire_ns": np.array(times.contended_wire_ns, np.int64).ravel(),
        "start_ns": np.array(times.start_ns if times.has_start else [], np.int64).ravel(),
        "kv_ns": np.zeros(0, np.int64),
        "slow_kv_ns": np.zeros(0, np.int64),
    }
    return Addressed({name: read_only(each) for name, each in (found | _batches(times)).items()})


def _dense(times: Times, lengths: np.ndarray, layers: int, contended: bool) -> np.ndarray:
    """Return (lengths, layers) durations; layer 0 includes the cost before the first layer."""
    dense = [[times.dense_ns(layer, int(length), contended) for layer in range(layers)] for length in lengths]
    for row, length in zip(dense, lengths, strict=True):
        row[0] += times.pass_ns(int(length), contended)
    return np.array(dense, np.int64).reshape(-1, layers)


def pass_lengths(inputs: Inputs, spec: RunSpec) -> np.ndarray:
    """Return for 0, 1, ... rows, up to the most, whether a pass has (or may have) so many."""
    if not spec.arrivals:
        lengths = inputs["pass_tokens"]
        return np.bincount(lengths, minlength=2) > 0  # sorting would take longer than all other work
    shares = np.maximum.reduceat(np.diff(inputs["share_start"]), inputs["first_share"][:-1])
    return np.arange(_together(shares, spec) + 1) > 0


def noted_lengths(inputs: Inputs, numbers: Mapping[str, int], notes: bool) -> dict[str, int]:
    """Return the room for notes on every step and on the accesses of steps with several tokens, or for the course."""
    course = course_length(numbers) if notes and depends_on_time(numbers) else 0
    tokens, layers = inputs["pass_tokens"], numbers["layers"] if notes and not depends_on_time(numbers) else 0
    accesses = np.minimum(tokens[tokens > 1] * numbers["width"], numbers["experts"]).sum() if layers else 0
    return {"n_noted": layers * len(tokens), "n_noted_tokens": layers * int(accesses), "n_course": course}


def course_length(numbers: Mapping[str, int]) -> int:
    """Return the room for a run's course; 0 if its marks are too many, or if numbers of tokens exceed a mark."""
    most = 6 * (numbers["n_demand"] + numbers["n_steps"])
    return most if most <= MOST_MARKS and numbers["n_most"] <= np.iinfo(np.int16).max else 0


def _together(of_requests: np.ndarray, spec: RunSpec) -> int:
    """Return the most that requests which run together may have in sum."""
    slots = slots_of(spec.config.passes)
    assert slots is not None  # checked when the run was planned
    return int(np.sort(of_requests)[-min(slots.many, len(of_requests)) :].sum())


def _kv(inputs: Inputs, spec: RunSpec) -> dict[str, np.ndarray]:
    """Return a layer's part of KV-cache reads for every pass, or where requests arrive for every context."""
    times = spec.times
    if not times.reads_kv:
        return {}
    contexts, row = np.unique(_contexts(inputs, spec), return_inverse=True)
    return {
        name: np.array([times.kv_ns(int(each), slow) for each in contexts], np.int64)[row]
        for name, slow in (("kv_ns", False), ("slow_kv_ns", True))
    }


def _batches(times: Times) -> dict[str, np.ndarray]:
    """Return the rates from which batch times follow: by the bytes and by the number of reads."""
    tables = times.batch_tables() if times.by_matrix else {name: [] for name in BATCH_TABLES}
    return {name: np.array(tables[name], np.int64).ravel() for name in BATCH_TABLES}


def _contexts(inputs: Inputs, spec: RunSpec) -> np.ndarray:
    """Return the context length of every pass: the sum over its requests, each up to its last row.

    Where requests arrive: every length, from 0 to the most.
    """
    if spec.arrivals:
        rows = inputs["share_start"][inputs["first_share"]]
        last = inputs["share_token"][rows[1:] - 1] - inputs["share_token"][rows[:-1]] + 1
        return np.arange(_together(last, spec) + 1)
    tokens, number = inputs["pass_tokens"], inputs["row_number"]
    if not len(number):
        return inputs["pass_position"] + tokens
    first = inputs["row_token"][np.unique(number, return_index=True)[1]]
    last = np.zeros((len(tokens), len(first)), np.int64)
    np.maximum.at(last, (np.repeat(np.arange(len(tokens)), tokens), number), inputs["row_token"] - first[number] + 1)
    return last.sum(1)


def _per_tokens(of: Callable[[int, int, int], int], kinds: Sequence[tuple[int, int]], tokens: int) -> np.ndarray:
    table = [[of(row, precision, count) for count in range(tokens + 1)] for row, precision in kinds]
    return np.array(table, np.int64).reshape(len(kinds), tokens + 1)
