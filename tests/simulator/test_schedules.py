"""Passes of several requests, and schedulers that decide at run time: a slow model, the engines, and cases by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from moereplay.policies.contract import DECODE, PREFILL, PolicyError
from moereplay.simulator.config import configure
from moereplay.simulator.reference.engine import run, run_scheduled
from moereplay.simulator.replay import replay as replay_trace
from moereplay.simulator.source import InOrder, Pass, Row, TraceGates, TraceSource
from moereplay.traces.schema import Trace
from moereplay.traces.units import UNIT
from moereplay.traces.writer import write_trace
from tests.kit.cases import (
    ENGINES,
    ListSource,
    Outcome,
    Prompted,
    machine,
    outcome_of,
    replay_lists,
    sizes,
    spec_of,
    tokens,
)
from tests.kit.every import every
from tests.kit.parity import batched, seen
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.scenarios import CONTRACTS, Scenario
from tests.kit.search import searched
from tests.simulator.test_drafts import EVERYTHING, check_bounds_and_curves, crowd

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


@every("seed", range(3))
@every(
    "arrivals, together, most",
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


@every("miss", ["drop:keep=0", "substitute:tolerance=.5", "fetch"])
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


@every("settings", [{"eviction": "belady"}, {"prefetch": "oracle"}])
def test_a_policy_that_needs_the_future_is_refused(settings: dict[str, str]) -> None:
    trace = random_trace(6, SIZES)
    with pytest.raises(PolicyError, match="needs the future, which depends on passes to come; choose a policy"):
        replay(trace, Batches(trace, (0, 0, 0), 2), **settings)


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(60)
@given(batched())
def test_both_engines_agree_on_passes_of_any_rows(contract: str, scenario: Scenario) -> None:
    """Gaps in a request's tokens, requests and phases mixed, rows in any order: every counter, time and event."""
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


@searched(60)
@given(batched(contract="atomic", miss="fetch", warm=(), routing="standard"))
def test_both_engines_agree_on_them_where_only_the_kernel_of_batches_can_be_used(scenario: Scenario) -> None:
    assert seen(scenario, "compiled") == seen(scenario, "reference")


# --passes batch:N


def test_two_requests_in_slots_by_hand() -> None:
    """One layer; a request of prompt (0, 1) and token 2, one of prompt (0) and tokens 3, 0; two experts fit.

    Dense 3 ns, an expert 2 ns and 1 ns per token, a transfer 5 ns; in a tie more tokens come first, then lower ids.

    pass 0, both prompts: gate at 3, 0 (for two tokens) arrives at 8 and runs to 12, 1 arrives at 13 and runs to 16.
    pass 1, a token of each: gate at 19, 2 takes the room of 0 and arrives at 24, 3 that of 1 at 29, ends at 32.
    pass 2, only the second is left: gate at 35, 0 takes the room of 2 and arrives at 40, ends at 43.

    The first request leads passes 0 and 1: their accesses and times are charged to it, though the second has half of
    their tokens; both spend the passes' time.
    """
    requests = [Prompted(tokens([[0]], [[1]], [[2]]), 2), Prompted(tokens([[0]], [[3]], [[0]]), 1)]
    source = ListSource(sizes(1, 4, 1), requests, "batch:2")
    found = replay_lists(source, 2, WHERE, passes="batch:2")
    first, second = found.requests
    times = ("start_ns", "ttft_ns", "decode_ns", "decode_passes", "end_ns", "tokens")
    assert [first[name] for name in times] == [0, 16, 16, 1, 32, 3]
    assert [second[name] for name in times] == [0, 16, 16 + 11, 2, 43, 3]
    once = ("accesses", "misses", "compulsory", "capacity", "evictions", "bytes_demand")
    assert [first[name] for name in once] == [4, 4, 4, 0, 2, 4]
    assert [second[name] for name in once] == [1, 1, 0, 1, 1, 1]
    spent = ("dense_ns", "expert_ns", "stall_ns")
    assert [first[name] for name in spent] == [6, (2 + 2) + 3 * 3, 6 + 7]
    assert [second[name] for name in spent] == [3, 3, 5]
    assert [first["assignments"], second["assignments"]] == [3, 3]
    prefill, decode = found.layers
    assert [prefill[name] for name in (*once, "assignments")] == [2, 2, 2, 0, 0, 2, 3]
    assert [decode[name] for name in (*once, "assignments")] == [3, 3, 2, 1, 3, 3, 3]


@pytest.fixture(scope="module", params=["in memory", "mapped"])
def five(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Five requests of several lengths, with everything recorded."""
    trace = crowd()
    if request.param == "in memory":
        return trace
    requests = [trace.request(number) for number in range(trace.requests)]
    return write_trace(tmp_path_factory.mktemp("crowd") / "crowd.zarr", trace.header, requests)


@pytest.mark.parametrize("settings", EVERYTHING.values(), ids=EVERYTHING)
def test_both_engines_replay_a_trace_in_slots(five: Trace, settings: dict[str, str]) -> None:
    """One slot is the default schedule."""
    for passes in ("batch:1", "batch:2", "batch:3", "batch:9"):
        config = configure(capacity="50%", passes=passes, **settings)
        compiled, reference = (replay_trace(five, config, engine=engine) for engine in ENGINES)
        for part in ("totals", "per_layer", "per_request"):
            assert getattr(compiled, part) == getattr(reference, part), (passes, part)
        assert [row["request"] for row in compiled.per_request] == list(range(five.requests)), passes
    one, default = (
        replay_trace(five, configure(capacity="50%", passes=passes, **settings), log=True)
        for passes in ("batch:1", "recorded")
    )
    for part in ("totals", "per_layer", "per_request", "events"):
        assert getattr(one, part) == getattr(default, part)


def test_what_belongs_to_tokens_does_not_depend_on_slots(five: Trace) -> None:
    alone, together = (
        replay_trace(five, configure(capacity="50%", passes=passes)).per_request for passes in ("recorded", "batch:3")
    )
    for one, of_three in zip(alone, together, strict=True):
        for name in ("assignments", "assignments_kept", "mass", "mass_kept", "tokens", "decode_passes"):
            assert one[name] == of_three[name]
    assert sum(row["accesses"] for row in together) < sum(row["accesses"] for row in alone)


@every("passes, reset, contract", product(("batch:2", "batch:9"), ("never", "request", "6"), CONTRACTS))
def test_bounds_and_curves_serve_slots(five: Trace, passes: str, reset: str, contract: str) -> None:
    check_bounds_and_curves(five, "80%", {"passes": passes, "reset": reset, "contract": contract})


def test_gates_of_tokens_that_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereplay.simulator.source.BLOCKS", 2)
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
