"""Passes of several requests, and schedulers that decide at run time: the reference engine against a slow model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

import simulator.source
from policies.contract import DECODE, PREFILL, PolicyError
from simulator.compiled.engine import run_source
from simulator.errors import ConfigError
from simulator.reference.engine import run, run_scheduled
from simulator.source import InOrder, Pass, Row, TraceGates, TraceSource
from tests.kit.cases import Outcome, machine, outcome_of, spec_of
from tests.kit.policy_runs import Sizes, random_trace
from traces.demand import UNIT
from traces.schema import Trace

DENSE_NS, EXPERT_NS, PER_TOKEN_NS, WIRE_NS = 3, 2, 1, 5
WHERE = machine(bytes_per_ns=1 / WIRE_NS, dense_ns=DENSE_NS, expert_ns=EXPERT_NS, expert_ns_per_token=PER_TOKEN_NS)
SIZES = Sizes(layers=3, experts=6, k=2, tokens=9, prompt=3, requests=3, size=1)
CAPACITY = 8  #: experts: more than one step can demand, fewer than there are
NEEDS = frozenset({"weights", "logits"})


class Batches:
    """Continuous batching: a request joins when it has arrived and a place is free; its prompt first, then by token.

    Which rows a pass has depends on the time at which the pass before it ended.
    """

    def __init__(self, trace: Trace, arrivals: Sequence[int], together: int) -> None:
        self._trace, self._arrivals, self._together = trace, arrivals, together
        self._waiting, self._running = list(range(trace.requests)), dict[int, int]()  # request -> its next token
        self.chosen: list[list[Row]] = []

    def next_rows(self, now: int) -> list[Row]:
        while self._waiting and len(self._running) < self._together:
            request = self._waiting[0]
            if self._running and self._arrivals[request] > now:
                break
            self._running[self._waiting.pop(0)] = int(self._trace.request_offsets[request])
        rows = [row for request in list(self._running) for row in self._advance(request)]
        self.chosen.append(rows)
        return rows

    def _advance(self, request: int) -> list[Row]:
        first, end = (int(token) for token in self._trace.request_offsets[request : request + 2])
        token, prompt = self._running[request], first + int(self._trace.prompt_lengths[request])
        stop, phase = (prompt, PREFILL) if token < prompt else (token + 1, DECODE)
        self._running[request] = stop
        if stop == end:
            del self._running[request]
        return [Row(request, at, phase) for at in range(token, stop)]


@dataclass
class Model:
    """LRU in one pool of equal experts, every miss fetched, nothing prefetched: plain loops, times by hand."""

    trace: Trace
    now: int = 0
    uses: int = 0
    last_use: dict[tuple[int, int], int] = field(default_factory=dict)  #: of what is resident
    requests: dict[int, dict[str, int]] = field(default_factory=dict)
    cells: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)  #: (layer, phase)

    def run(self, scheduler: Batches) -> Model:
        while rows := scheduler.next_rows(self.now):
            began = self.now
            for row in rows:
                request = self.requests.setdefault(row.request, {"start_ns": began})
                self.add(request, "tokens")
            for layer in range(self.trace.geometry.layers):
                self.step(rows, layer)
            for request, phase in {(row.request, row.phase) for row in rows}:
                self.end_pass(self.requests[request], phase, began)
        return self

    def end_pass(self, request: dict[str, int], phase: int, began: int) -> None:
        request["end_ns"] = self.now
        if phase == PREFILL:
            request["ttft_ns"] = self.now - request["start_ns"]
        else:
            self.add(request, "decode_passes")
            self.add(request, "decode_ns", self.now - began)

    def step(self, rows: Sequence[Row], layer: int) -> None:
        tokens, weight = self.demand(rows, layer)
        order = sorted(tokens, key=lambda e: (-weight[e], e))
        missing = [e for e in order if (layer, e) not in self.last_use]
        self.count(rows[0], layer, accesses=len(order), hits=len(order) - len(missing), misses=len(missing))
        self.now += DENSE_NS
        gate = self.now
        for e in missing:
            self.make_space(layer, order)
            self.last_use[layer, e] = 0
        for e in order:
            self.uses += 1
            self.last_use[layer, e] = self.uses
        arrives = {e: gate + (n + 1) * WIRE_NS for n, e in enumerate(missing)}
        for e in [e for e in order if e not in missing] + missing:
            self.now = max(self.now, arrives.get(e, 0)) + EXPERT_NS + PER_TOKEN_NS * tokens[e]

    def demand(self, rows: Sequence[Row], layer: int) -> tuple[dict[int, int], dict[int, int]]:
        tokens, weight = dict[int, int](), dict[int, int]()
        for row in rows:
            ids = self.trace.read("chosen", row.token, row.token + 1)[0, layer].tolist()
            weights = self.trace.read("weights", row.token, row.token + 1)[0, layer].tolist()
            self.count(row, layer, assignments=len(ids))
            for e, w in zip(ids, weights, strict=True):
                tokens[e] = tokens.get(e, 0) + 1
                weight[e] = max(weight.get(e, 0), round(w * UNIT))
        return tokens, weight

    def make_space(self, layer: int, demanded: Sequence[int]) -> None:
        if len(self.last_use) == CAPACITY:
            others = [x for x in self.last_use if x not in {(layer, e) for e in demanded}]
            del self.last_use[min(others, key=self.last_use.__getitem__)]

    def count(self, row: Row, layer: int, **amounts: int) -> None:
        for name, amount in amounts.items():
            self.add(self.requests[row.request], name, amount)
            self.add(self.cells.setdefault((layer, row.phase), {}), name, amount)

    @staticmethod
    def add(counters: dict[str, int], name: str, amount: int = 1) -> None:
        counters[name] = counters.get(name, 0) + amount


def replay(trace: Trace, scheduler: Batches, **settings: object) -> Outcome:
    spec = spec_of(trace.geometry, CAPACITY, WHERE, **settings)  # pyright: ignore[reportArgumentType]
    gates = TraceGates(trace, spec.config.policy_set().prefetch, NEEDS)
    return outcome_of(run_scheduled(gates, spec, scheduler))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("arrivals", "together", "most"),
    [
        ((0, 0, 0), 2, 2),  # two requests in step, then the third
        ((0, 40, 90), 3, 3),  # prompts join decoding requests; when depends on the engine's own time
        ((0, 10**6, 10**6), 2, 1),  # nobody has arrived: the next one runs all the same
        ((0, 0, 0), 1, 1),
    ],
)
def test_passes_of_several_requests_equal_the_model(
    seed: int, arrivals: Sequence[int], together: int, most: int
) -> None:
    trace = random_trace(seed, SIZES)
    engine, model = Batches(trace, arrivals, together), Batches(trace, arrivals, together)
    found, expected = replay(trace, engine), Model(trace).run(model)
    assert engine.chosen == model.chosen
    assert max(len({row.request for row in rows}) for rows in engine.chosen) == most
    assert found["time_ns"] == expected.now
    for row in found.requests:
        request = expected.requests[row["request"]]
        assert {name: row[name] for name in request} == request
    for row in found.layers:
        cell = expected.cells[row["layer"], ("prefill", "decode").index(row["phase"])]
        assert {name: row[name] for name in cell} == cell


def test_one_request_at_a_time_is_the_default_schedule() -> None:
    trace = random_trace(3, SIZES)
    spec = spec_of(trace.geometry, CAPACITY, WHERE, prefetch="previous_token", miss="drop:keep=1")
    source = TraceSource(trace, "recorded", spec.config.policy_set().prefetch, NEEDS)
    found = replay(trace, Batches(trace, (0, 0, 0), 1), prefetch="previous_token", miss="drop:keep=1")
    assert found == outcome_of(run(source, spec)) == outcome_of(run_scheduled(source, spec, InOrder(source)))


@pytest.mark.parametrize("miss", ["drop:keep=0", "substitute:tolerance=.5", "fetch"])
def test_what_belongs_to_tokens_is_charged_to_their_own_requests(miss: str) -> None:
    trace = random_trace(4, SIZES)
    alone, batched = (replay(trace, Batches(trace, (0, 0, 0), together), miss=miss) for together in (1, 3))
    for one, of_three in zip(alone.requests, batched.requests, strict=True):
        for name in ("assignments", "mass", "tokens"):
            assert one[name] == of_three[name] > 0
    kept = ("mass_kept", "mass_substituted", "mass_dropped")
    assert all(sum(row[name] for name in kept) == row["mass"] for row in batched.requests)


def test_a_reset_by_request_waits_until_all_requests_are_others() -> None:
    trace = random_trace(5, SIZES)
    for together, resets in ((1, 2), (2, 1), (3, 0)):
        outcome = replay(trace, Batches(trace, (0, 0, 0), together), reset="request")
        assert len(outcome.spans("reset")) == resets


@pytest.mark.parametrize("settings", [{"eviction": "belady"}, {"prefetch": "oracle"}], ids=str)
def test_a_policy_that_needs_the_future_is_refused(settings: dict[str, str]) -> None:
    trace = random_trace(6, SIZES)
    with pytest.raises(PolicyError, match="needs the future, which depends on passes to come; choose a policy"):
        replay(trace, Batches(trace, (0, 0, 0), 2), **settings)


@pytest.mark.parametrize(
    "rows",
    [
        [Row(0, 8, DECODE), Row(1, 9, DECODE)],
        [Row(0, 2, PREFILL), Row(0, 3, DECODE)],
        [Row(0, 3, DECODE), Row(0, 5, DECODE)],
    ],
    ids=["requests", "phases", "a gap"],
)
def test_the_compiled_engine_refuses_a_pass_that_is_no_slice(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(3, SIZES)
    spec = spec_of(trace.geometry, CAPACITY, WHERE)
    source = TraceSource(trace, "recorded", spec.config.policy_set().prefetch, NEEDS)
    monkeypatch.setattr(source, "passes", lambda: iter([Pass(0, rows)]))
    with pytest.raises(ConfigError, match="not a slice of one request and phase; replay it with"):
        run_source(source, spec)


def test_gates_of_tokens_that_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.source, "BLOCKS", 2)
    trace = random_trace(7, Sizes(layers=1, experts=4, k=2, tokens=700, prompt=0, requests=3))
    spec = spec_of(trace.geometry, 4, WHERE)
    gates = TraceGates(trace, spec.config.policy_set().prefetch, NEEDS)
    rows = [Row(token // 700, token, DECODE) for token in (1500, 3, 1400, 2, 800)]
    found = gates.gate(Pass(0, rows), 0)
    assert np.array_equal(found.ids, trace.read("chosen", 0, 2100)[[row.token for row in rows], 0])
    each = [gates.gate(Pass(0, [row]), 0) for row in rows]
    for name in ("ids", "mass", "logits", "choice", "scores"):
        assert getattr(found, name) == [row for gate in each for row in getattr(gate, name)]
    assert sum(found.demand.tokens) == 2 * len(rows)
