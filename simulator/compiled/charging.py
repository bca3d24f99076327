"""Charge the decisions that one replay noted with the times of another platform.

Where nothing is prefetched and the demand of every step fits its pool, no decision depends on time: all that a step
demands has landed when it ends, so the next gate finds the same residents whatever the link. The fast path then notes
the hits and misses of every step, and the times of a platform follow from them:

- transfers of a step begin at its gate, in demand order, as many at once as the link is deep, and land one after the
  other: after the `i`-th, lands(i) = max(begins(i) + latency, lands(i - 1)) + bytes on the wire;
- compute runs the hits, then each miss when it has landed.

Steps of the same layer with as many hits and misses of as many tokens take equally long, so each such *shape* is
computed once. All numbers are integers, and equal those of a replay.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moereplay.simulator.compiled.counters import (
    DECODE,
    DENSE_NS,
    END,
    EXPERT_NS,
    FIRST,
    LINK_BUSY_NS,
    NO_FIRST,
    STALL_NS,
    START,
    WIDTH,
)
from moereplay.simulator.compiled.initial import SimulationState
from moereplay.simulator.compiled.layout import SETTING
from moereplay.simulator.compiled.state import NO_ERROR
from moereplay.simulator.compiled.variants import is_priced
from moereplay.simulator.config import KINDS
from moereplay.simulator.errors import LATEST_NS
from moereplay.simulator.interface import RunSpec

RESULTS = ("cells", "lifetimes", "rows", "row_times")
#: Columns of the counters that do not depend on a platform's times.
COUNTED = [column for column in range(WIDTH) if column not in (DENSE_NS, EXPERT_NS, LINK_BUSY_NS, STALL_NS)]


def key_of(spec: RunSpec) -> Hashable:
    """Return what the decisions of a replay of a trace follow from: everything but the platform's times."""
    geometry, config = spec.layout.geometry, spec.config.model_copy(update={"platform": ""})
    sizes = (spec.layout.tiers, geometry.layers, geometry.experts, geometry.k, geometry.router)
    chosen = spec.chosen.priced(spec.times)
    policies = tuple((of.policy.label, *of.par()) for of in (getattr(chosen, kind) for kind in KINDS))
    return config, sizes, spec.pools, spec.resident, policies


class NotedCourse:
    """The course and the results of a finished run whose decisions depend on time (course.py)."""

    def __init__(self, state: SimulationState) -> None:
        """`state` is that at the end of a run that noted its course."""
        self._results = {name: state.arrays[name] for name in RESULTS}
        self._fixed = _fixed(state)
        self.marks = state.arrays["course"][: int(state["course"]["end"])]
        self.holds = len(self.marks) == state["course"]["end"]  # else there was no room for all

    def fits(self, state: SimulationState) -> bool:
        """Return whether a state that has not begun differs from this run's in the numbers of `follow` alone."""
        return state.is_fast and not is_priced(state) and _fixed(state) == self._fixed

    def complete(self, state: SimulationState) -> bool:
        """Add all but the times to the results of a state that has followed the course; return False if it has not."""
        if state["course"]["differs"] or state["errors"]["error"] != NO_ERROR:
            return False
        state.arrays["lifetimes"][:] = self._results["lifetimes"]
        for name in ("cells", "rows"):
            mine, known = (each.reshape(-1, WIDTH) for each in (state.arrays[name], self._results[name]))
            mine[:, COUNTED] = known[:, COUNTED]
        return True


def _fixed(state: SimulationState) -> list[int]:
    """Return the numbers of a state on which decisions depend, besides the order of events."""
    return [*(int(state[name]) for name in SETTING.split()), int(state["links"][0]["depth"])]


class Shapes(NamedTuple):
    """The distinct steps of a run, the most misses first, and which of them each step is.

    Access `i` of a shape, the hits first, has the tokens at `at + stride * i`.
    """

    layer: np.ndarray  #: (shapes,)
    hits: np.ndarray
    misses: np.ndarray
    at: np.ndarray
    stride: np.ndarray  #: 0 where every access has one token
    tokens: np.ndarray  #: 1 for every layer, then those of accesses in passes of several tokens
    of_access: np.ndarray  #: layer of each of these
    of_step: np.ndarray  #: (passes, layers)


class Ends(NamedTuple):
    """Where requests begin and end, as positions of passes."""

    first_pass: np.ndarray  #: of every request
    last_pass: np.ndarray
    prompt_pass: np.ndarray  #: that ends its prompt; -1 without a prompt
    decode_number: np.ndarray  #: of every share in a pass that decodes: its request, and the pass
    decode_pass: np.ndarray


class NotedRun:
    """The noted decisions and the results of a finished run."""

    def __init__(self, state: SimulationState, spec: RunSpec) -> None:
        """`state` is that at the end of a run with notes."""
        self._results = {name: state.arrays[name] for name in RESULTS}
        self._inputs = {name: state.arrays[name] for name in ("pass_tokens", "pass_phase", "pass_number")}
        self._rows = {name: state.arrays[name] for name in ("row_number", "row_phase", "row_opens")}
        self._hits, self._misses = (state.arrays[name].astype(np.int64) for name in ("noted_hits", "noted_misses"))
        self._tokens, self._layers = state.arrays["noted_tokens"][: int(state["notes"]["end"])], int(state["layers"])
        self._sizes, self._pools = np.array(spec.layout.tiers[0], np.int64), np.array(spec.pools, np.int64)

    @cached_property
    def holds(self) -> bool:
        """Whether the demand of every step fits its pool, so that no decision depends on time."""
        shapes, pools = self._shapes, np.broadcast_to(self._pools, self._layers)
        needed = (shapes.hits + shapes.misses) * self._sizes[shapes.layer]
        return bool((needed <= pools[shapes.layer]).all())

    def charge(self, state: SimulationState) -> bool:
        """Bring the state of a run that has not begun to its end; return False if a replay must, since it is too long.

        The state must be `noting`, with the same key as this run's.
        """
        spent, busy, whole = _costs(state, self._shapes)
        dense = state.arrays["dense_ns"][state.arrays["dense_row"][self._inputs["pass_tokens"]]]
        if float(dense.sum(dtype=float)) + float(whole[self._shapes.of_step].sum(dtype=float)) > LATEST_NS / 2:
            return False
        by_pass = [each[self._shapes.of_step].sum(1) for each in (spent, busy, whole)]
        of_pass = {DENSE_NS: dense.sum(1), EXPERT_NS: by_pass[0], LINK_BUSY_NS: by_pass[1]}
        of_pass[STALL_NS] = by_pass[2] - by_pass[0]
        for name, results in self._results.items():
            state.arrays[name][:] = results
        self._charge_requests(state, of_pass)
        self._charge_layers(state, {EXPERT_NS: spent, LINK_BUSY_NS: busy, STALL_NS: whole - spent})
        self._charge_dense(state)
        ends = np.cumsum(of_pass[DENSE_NS] + by_pass[2])
        self._set_times(state, ends)
        state["clock"]["time"] = ends[-1] if len(ends) else 0
        return True

    def _charge_requests(self, state: SimulationState, of_pass: dict[int, np.ndarray]) -> None:
        rows = state.arrays["rows"]
        for counter, amounts in of_pass.items():
            rows[:, counter] = 0
            np.add.at(rows[:, counter], self._inputs["pass_number"], amounts)

    def _charge_layers(self, state: SimulationState, of_shape: dict[int, np.ndarray]) -> None:
        cells = state.arrays["cells"].reshape(self._layers, 2, WIDTH)
        for counter, amounts in of_shape.items():
            cells[:, :, counter] = 0
            for phase in (0, 1):
                np.add.at(cells[:, phase, counter], self._shapes.layer, amounts * self._often[phase])

    def _charge_dense(self, state: SimulationState) -> None:
        cells, table = state.arrays["cells"].reshape(self._layers, 2, WIDTH), state.arrays["dense_ns"]
        rows = state.arrays["dense_row"][self._inputs["pass_tokens"]]
        for phase in (0, 1):
            often = np.bincount(rows[self._inputs["pass_phase"] == phase], minlength=len(table))
            cells[:, phase, DENSE_NS] = often @ table

    def _set_times(self, state: SimulationState, ends: np.ndarray) -> None:
        times, begins, at = state.arrays["row_times"], np.append(0, ends[:-1]), self._ends
        times[:, START], times[:, END] = begins[at.first_pass], ends[at.last_pass]
        prompted = at.prompt_pass >= 0
        times[:, FIRST] = np.where(prompted, ends[at.prompt_pass] - times[:, START], NO_FIRST)
        times[:, DECODE] = 0
        np.add.at(times[:, DECODE], at.decode_number, (ends - begins)[at.decode_pass])

    @cached_property
    def _often(self) -> list[np.ndarray]:
        """How often each shape occurs in either phase."""
        steps, many = self._shapes.of_step, len(self._shapes.layer)
        return [np.bincount(steps[self._inputs["pass_phase"] == phase].ravel(), minlength=many) for phase in (0, 1)]

    @cached_property
    def _ends(self) -> Ends:
        tokens, number, phase = (self._inputs[name] for name in ("pass_tokens", "pass_number", "pass_phase"))
        at = np.arange(len(tokens))
        if len(self._rows["row_number"]):
            opens = self._rows["row_opens"] == 1
            at, number, phase = (
                np.repeat(at, tokens)[opens],
                self._rows["row_number"][opens],
                self._rows["row_phase"][opens],
            )
        requests = len(self._results["row_times"])
        first, last, prompt = (np.full(requests, -1) for _ in range(3))
        last[number], first[number[::-1]] = at, at[::-1]
        prompt[number[phase == 0]] = at[phase == 0]
        return Ends(first, last, prompt, number[phase == 1], at[phase == 1])

    @cached_property
    def _shapes(self) -> Shapes:
        layers, hits, misses = self._layers, self._hits, self._misses
        tokens, layer = np.repeat(self._inputs["pass_tokens"], layers), np.arange(len(hits)) % layers
        alone, others = np.flatnonzero(tokens == 1), np.flatnonzero(tokens > 1)
        most = int((hits + misses)[alone].max(initial=0)) + 1
        code = (layer[alone] * most + hits[alone]) * most + misses[alone]
        often = np.bincount(code)
        known, each = np.flatnonzero(often), (hits + misses)[others]
        of_step = np.empty(len(hits), np.int64)
        of_step[alone] = (np.cumsum(often > 0) - 1)[code]
        of_step[others] = len(known) + np.arange(len(others))
        columns = [
            np.append(known // most**2, layer[others]),
            np.append(known // most % most, hits[others]),
            np.append(known % most, misses[others]),
            np.append(known // most**2, layers + np.cumsum(each) - each),
            np.append(np.zeros(len(known), np.int64), np.ones(len(others), np.int64)),
        ]
        order = np.argsort(-columns[2], kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        every = np.append(np.ones(layers, np.int64), self._tokens)
        of_access = np.append(np.arange(layers), np.repeat(layer[others], each))
        sorted_columns = [each[order] for each in columns]
        return Shapes._make([*sorted_columns, every, of_access, rank[of_step].reshape(-1, layers)])


def _costs(state: SimulationState, shapes: Shapes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what every shape takes from its gate, ns: compute, the link, and all of it."""
    arrays, layer, most = state.arrays, shapes.layer, int(shapes.misses.max(initial=0))
    cost = np.append(
        arrays["expert_ns"][arrays["cost_row"][shapes.of_access], shapes.tokens], 0
    )  # the last may be empty
    sums = np.append(0, np.cumsum(cost))
    stop = shapes.at + shapes.stride * shapes.hits
    time = np.where(shapes.stride == 0, shapes.hits * cost[shapes.at], sums[stop] - sums[shapes.at])
    spent = time.copy()
    lands, busy = _transfers(state, most)
    for i in range(most):
        n = int(np.searchsorted(-shapes.misses, -i))  # those with more misses come first
        runs = cost[(stop + shapes.stride * i)[:n]]
        spent[:n] += runs
        time[:n] = np.maximum(time[:n], lands[i, layer[:n]]) + runs
    return spent, busy[shapes.misses, layer], time


def _transfers(state: SimulationState, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return when each transfer of a step lands after its gate, and how long that many keep the link busy, ns."""
    link, whole = state["links"][0], state.arrays["wire_ns"]
    depth, latency = int(link["depth"]), int(link["latency_ns"])
    lands, busy = np.zeros((most, len(whole)), np.int64), np.zeros((most + 1, len(whole)), np.int64)
    done = np.zeros(len(whole), np.int64)
    for i in range(most):
        begins = lands[i - depth] if i >= depth else np.zeros(len(whole), np.int64)
        lands[i] = np.maximum(begins + latency, done) + whole
        busy[i + 1] = busy[i] + lands[i] - np.maximum(begins, done)
        done = lands[i]
    return lands, busy
