"""The least time that any eviction with any prefetch needs: links carry what no cache avoids, compute takes its own."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moereplay.simulator.bounds import RELAXED, Bound
from moereplay.simulator.compiled.inputs import costs_of, inputs_of
from moereplay.simulator.curves.stream import ACCESSES, HITS, Cut, Demands, demands_of, keys, look_up, started
from moereplay.simulator.jit.calls import compiled
from moereplay.simulator.replay import Plan
from moereplay.simulator.step_time import landings_at_once
from moereplay.simulator.threads import check_stop
from moereplay.simulator.times import Times
from moereplay.traces.demand import Demand, demand_of
from moereplay.traces.drafts import REJECTED
from moereplay.traces.passes import Passes, schedule
from moereplay.traces.schema import Trace
from moereplay.traces.units import DECODE, NEVER

# the walk over the steps of a window


class Steps(NamedTuple):
    """Times of compute and links, S steps, without contention."""

    dense_ns: np.ndarray  #: (S,) int64, before the gate
    expert_ns: np.ndarray  #: (S,) int64, all experts of the step
    last_ns: np.ndarray  #: (S,) int64: of the expert that arrived last, at least
    carried_ns: np.ndarray  #: (n + 1,) int64: until the links have carried 0, 1, ... n experts


def _first_uses(demands, first, cut, coming):
    """Return when each expert is first used from a step on; `coming` has NEVER for unused ones."""
    for step in range(len(demands.offsets) - 2, first - 1, -1):
        base = step % cut.layers * cut.experts
        for at in range(demands.offsets[step], demands.offsets[step + 1]):
            coming[base + np.int64(demands.expert[at])] = at


def _window(demands, origin, first, last, cut, bits, pools, steps, base, counts, ends):
    """Raise the limits `ends` of steps [first, last), counted from `origin`, by the transfers from `first` on.

    `base`: the limit at which the window begins, and whether nothing can be fetched before its first gate; `counts` are
    those of `stream`.
    """
    begun, now = base[0], base[0]
    if base[1]:
        begun += steps.dense_ns[first]
    for step in range(first, last):
        layer = step % cut.layers
        pool, start = layer if cut.per_layer else 0, layer * cut.experts
        begin, stop = demands.offsets[step], demands.offsets[step + 1]
        together, missed = stop - begin if cut.atomic else 1, counts[ACCESSES] - counts[HITS]
        for group in range(begin, stop, max(1, together)):
            look_up(demands, group, group + together, pool, start, bits, False, pools, counts)
        now += steps.dense_ns[step] + steps.expert_ns[step]
        if counts[ACCESSES] - counts[HITS] > missed:
            now = max(now, begun + steps.carried_ns[counts[ACCESSES] - counts[HITS]] + steps.last_ns[step])
        now = max(now, ends[step - origin])
        ends[step - origin] = now


WINDOW, FIRST_USES = compiled(_window), compiled(_first_uses)


WINDOWS = 8  #: begun in a stretch of passes without a reset, at equal distances


class LeastTime(NamedTuple):
    """A lower bound on time for any eviction and prefetch."""

    time_ns: int
    decode_ns: int  #: summed over requests
    decode_tokens: int  #: likewise; 0 where nothing is decoded


class Run(NamedTuple):
    """A trace's demand under a configuration, and the counting state."""

    demands: Demands
    cut: Cut
    slots: tuple[int, ...]
    steps: Steps


def least_time(trace: Trace, ready: Plan, bound: Bound) -> LeastTime:
    """Return the bound for a plan that fetches every miss at one precision, without side buffers.

    `bound` is the plan's relaxed bound.
    """
    geometry, passes = trace.geometry, schedule(trace, bound.passes)
    assert bound.admission == RELAXED
    cut = Cut(geometry.layers, geometry.experts, bound.scope == "per_layer", bound.contract == "atomic")
    demand = demand_of(trace, bound.passes)
    run = Run(demands_of(trace, bound.passes, bound.reset), cut, bound.slots, _steps(trace, ready, demand))
    warm = [layer * geometry.experts + expert for layer, expert in bound.warm]
    least = cache(partial(_least_ns, run, keys([(x, int(demand.first_use[x])) for x in warm], cut)))
    weights = _decoding(passes)
    levels = range(1, int(weights.max(initial=0)) + 1)  # a pass of w requests is in w of them
    decode_ns = sum(least(first, last) for level in levels for first, last in _stretches(weights >= level))
    return LeastTime(least(0, len(passes)), decode_ns, _decoded(passes, int(weights.sum())))


def _decoding(passes: Passes) -> np.ndarray:
    """Return the number of requests that each pass decodes for, (P,) int64."""
    if passes.rows is None:
        return (passes.phase == DECODE).astype(np.int64)
    of = np.repeat(np.arange(len(passes)), passes.stop - passes.start)
    pairs = np.stack([of, passes.rows.request])[:, passes.rows.phase == DECODE]
    return np.bincount(np.unique(pairs, axis=1)[0], minlength=len(passes))


def _decoded(passes: Passes, without_drafts: int) -> int:
    """Return the number of tokens that are decoded, rejected drafts left out."""
    if passes.rows is None:
        return without_drafts
    return int(((passes.rows.phase == DECODE) & (passes.rows.draft != REJECTED)).sum())


def _stretches(wanted: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive wanted passes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _steps(trace: Trace, ready: Plan, demand: Demand) -> Steps:
    spec, layers = ready.spec(log=False), trace.geometry.layers
    inputs = inputs_of(trace, ready.config, frozenset(), frozenset())
    costs = costs_of(inputs, spec, decided=False)  # of any eviction and prefetch: these may cost nothing
    dense = costs["dense_ns"][costs["dense_row"][inputs["pass_tokens"]]]
    if len(costs["kv_ns"]):
        dense = dense + costs["kv_ns"][:, None]
    if len(inputs["pass_drafts"]):
        dense[:, 0] += spec.times.draft_ns(1) * inputs["pass_drafts"]
    many = np.diff(demand.offsets)
    layer = np.repeat(np.arange(len(many)) % layers, many)
    rows = ready.layout.rows[layer * trace.geometry.experts + demand.expert]
    each = costs["expert_ns"][costs["cost_row"][rows], demand.tokens]
    ends = np.concatenate([[0], np.cumsum(each)])
    expert = ends[demand.offsets[1:]] - ends[demand.offsets[:-1]]
    last = np.zeros(len(many), np.int64)
    times = spec.times
    if times.has_stages and times.slows_compute:  # each stage is rounded separately, and may have another rate
        expert = np.maximum(0, expert - many * (len(times.matrices) - 1))
    if len(each) and not (times.has_pieces or times.has_stages):  # else compute may begin before the last bytes
        last[many > 0] = np.minimum.reduceat(each, demand.offsets[:-1][many > 0])
    return Steps(np.ascontiguousarray(dense).ravel(), expert, last, carried(times, len(each)))


def carried(times: Times, most: int) -> np.ndarray:
    """Return the earliest times at which the links have carried 0, 1, ... `most` experts, (most + 1,) int64 ns.

    All experts count with the least bytes, and any link may carry any of them. Where
    links read matrix by matrix they are in batches of the size that takes the least time per expert.
    """
    many = np.arange(1, most + 1, dtype=np.int64)
    ends = []
    for home in sorted(set(times.homes)):
        if times.by_matrix:
            each = _least_in_batches(times, home)
            ends.append(times.latency_ns[home] - (-many * each.numerator // each.denominator))
            continue
        latency, depth, wire = times.latency_ns[home], times.depth[home], min(row[0] for row in times.wire_ns[home])
        ends.append(landings_at_once(most, depth, latency, wire))
    return np.concatenate([[0], np.sort(np.concatenate(ends))[:most]]).astype(np.int64)


def _least_in_batches(times: Times, home: int) -> Fraction:
    """Return the least time of an expert on the wire in nanoseconds, over its layers and the sizes of batches."""
    rows = {size: row for row, size in enumerate(times.expert_bytes)}.values()
    experts = len(times.homes) // len(times.expert_bytes)
    batches = [(many, row) for row in rows for many in range(1, experts + 1)]
    return min(Fraction(times.batch_ns(home, [(row, 0)] * many), many) for many, row in batches)


def _least_ns(run: Run, warm: list[int], first: int, last: int) -> int:
    """Return the least time between the starts of two passes: the sum over stretches between resets."""
    resets = np.flatnonzero(run.demands.fresh[first:last]) + first
    edges = [first, *(each for each in resets.tolist() if each > first), last]
    return sum(_of_stretch(run, begin, end, warm) for begin, end in pairwise(edges))


def _of_stretch(run: Run, first: int, last: int, warm: list[int]) -> int:
    """Return the least time of a stretch without a reset.

    Windows begin at equal distances; each raises the limits of its steps.
    """
    layers, ends = run.cut.layers, np.zeros((last - first) * run.cut.layers, np.int64)
    ends[:] = np.cumsum((run.steps.dense_ns + run.steps.expert_ns)[first * layers : last * layers])
    for begin in np.unique(np.linspace(first, last, WINDOWS, endpoint=False).astype(np.int64)).tolist():
        check_stop()
        at_rest = begin == 0 or bool(run.demands.fresh[begin])
        held = (warm if begin == 0 else []) if at_rest else _nearest(run, begin)
        pools = started(run.cut, run.slots, held)
        base = np.array([ends[(begin - first) * layers - 1] if begin > first else 0, at_rest], np.int64)
        bits = (run.cut.layers * run.cut.experts).bit_length()
        where, counts = (first * layers, begin * layers, last * layers), np.zeros(3, np.int64)
        WINDOW(run.demands, *where, run.cut, bits, pools, run.steps, base, counts, ends)
    return int(ends[-1])


def _nearest(run: Run, begin: int) -> list[int]:
    """Return the keys of the experts that are used soonest from a pass on and fit: an ideally prepared cache."""
    coming = np.full(run.cut.layers * run.cut.experts, NEVER, np.int64)
    FIRST_USES(run.demands, begin * run.cut.layers, run.cut, coming)
    chosen = []
    for pool, units in enumerate(np.split(np.arange(len(coming)), run.cut.pools)):
        soonest = units[np.argsort(coming[units], kind="stable")[: run.slots[pool]]]
        chosen += [(x, use) for x, use in zip(soonest.tolist(), coming[soonest].tolist(), strict=True) if use < NEVER]
    return keys(chosen, run.cut)
