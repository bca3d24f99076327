"""Limits beside results: no fixed set hits more, no replay is faster, whatever is evicted and prefetched."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.results.result import Result
from moereplay.simulator.bounds import RELAXED, Bound, bound_of, count
from moereplay.simulator.capacity import size_of
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.limits.least_time import LeastTime, carried, least_time
from moereplay.simulator.limits.limits import fixed_set
from moereplay.simulator.platform import Link, LowerTier, Platform
from moereplay.simulator.replay import plan, replay_source, report
from moereplay.simulator.times import Times
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace, memory_trace
from tests.kit.cases import at_rate, machine, sizes
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.scenarios import all_prices, read_by_matrix
from tests.kit.search import searched
from tests.simulator.test_curves import trace_of

EVICTIONS = ("lru", "lfu", "random", "arc", "least_stale", "belady", "belady:bypass=true", "static", "pinned:share=.6")
PREFETCHES = ("none", "oracle", "oracle:horizon=3", "top_k", "top_k:factor=2:depth=2", "previous_token", "frequent")


class Case(NamedTuple):
    """A trace, settings of a replay, and a machine on which events coincide."""

    trace: Trace
    config: ReplayConfig
    where: Platform

    @property
    def relaxed(self) -> Bound:
        bound = bound_of(self.trace, self.config.model_copy(update={"prefetch": "none"}))
        assert bound is not None
        return replace(bound, admission=RELAXED)

    @property
    def ready(self) -> Any:
        lower = tuple(size_of(tier.capacity, "capacity") for tier in self.where.tiers)
        return replace(plan(self.trace, self.config), machine=self.where, lower=lower)

    def least(self) -> LeastTime:
        return least_time(self.trace, self.ready, self.relaxed)

    def run(self, engine: str) -> Result:
        if engine == "reference":
            return replay_source(self.ready.spec(log=False).source_of(self.trace), self.ready)
        from moereplay.simulator.compiled import engine as compiled

        return report(compiled.run(self.trace, self.ready.spec(log=False)), self.ready)


@st.composite
def cases(draw: st.DrawFn, evictions: tuple[str, ...] = EVICTIONS, prefetches: tuple[str, ...] = PREFETCHES) -> Case:
    """Any schedule, scope, contract, reset and start; a machine of a few nanoseconds with any price."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(3, 6))
    k, size = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    prefetch = draw(st.sampled_from(prefetches if layers > 1 else ("none",)))
    shape = Sizes(
        layers=layers,
        experts=experts,
        k=k,
        tokens=draw(st.integers(3, 12)),
        prompt=draw(st.integers(0, 3)),
        requests=draw(st.integers(1, 3)),
        depth=min(2, layers - 1),
        size=size,
    )
    trace = random_trace(draw(st.integers(0, 2**32 - 1)), shape)
    how = {
        "scope": draw(st.sampled_from(("global", "per_layer"))),
        "contract": draw(st.sampled_from(("atomic", "sequential"))),
        "passes": draw(st.sampled_from(("recorded", "token", "chunk:2", "batch:2"))),
        "reset": draw(st.sampled_from(("never", "request", "5"))),
        "eviction": draw(st.sampled_from(evictions)),
        "prefetch": "top_k" if layers == 2 and "depth=2" in prefetch else prefetch,
        "prefetch_at": draw(st.sampled_from(("gate", "after_demand"))),
    }
    slots = draw(st.integers(1, experts))
    many = slots * layers if how["scope"] == "per_layer" else draw(st.integers(1, layers * experts))
    warm = [(0, 0)] if draw(st.booleans()) else []
    return Case(trace, configure(capacity=f"{many * size}B", warm=warm, **how), draw(machines()))


@st.composite
def machines(draw: st.DrawFn) -> Platform:
    few, rates = st.integers(0, 7), st.sampled_from((0.5, 1.0, 3.0, float("inf")))
    names = ("dense_ns", "expert_ns", "expert_ns_per_token", "pass_ns", "latency_ns")
    spent: dict[str, Any] = {name: draw(few) for name in names}
    more = [at_rate(Link(bytes_per_s=1, latency_ns=draw(few), depth=draw(st.integers(1, 3))), draw(rates) * 1e9)]
    lower = [LowerTier(name="lower", capacity="20B", bytes_per_s=1e9)]
    of: dict[str, Any] = {
        "bytes_per_ns": draw(rates),
        "depth": draw(st.integers(1, 3)),
        "more": more if draw(st.booleans()) else (),
        "tiers": lower if draw(st.integers(0, 3)) == 0 else (),
        "prices": draw(st.one_of(st.just({}), all_prices())),
    }
    return machine(**spent, **(draw(read_by_matrix(of)) if draw(st.booleans()) else of))


# ---------------------------------------------------------------- residents that never change


def hits_of(accesses: list[list[tuple[int, int]]], chosen: set[tuple[int, int]], loaded: set) -> tuple[int, int]:
    """Count hits of a fixed set between resets: preloaded, and with a first access of each that misses."""
    free = paid = 0
    for at, stretch in enumerate(accesses):
        seen = set(loaded) if at == 0 else set()
        for x in stretch:
            free += x in chosen
            paid += x in chosen and x in seen
            seen.add(x)
    return free, paid


@searched(60)
@given(cases(evictions=("lru",), prefetches=("none",)))
def test_no_set_of_fixed_residents_hits_more_and_one_hits_as_often(case: Case) -> None:
    bound, layers = case.relaxed, case.trace.geometry.layers
    demand, fresh = demand_of(case.trace, bound.passes), fresh_of(case)
    accesses: list[list[tuple[int, int]]] = [[]]
    for step in range(len(demand.offsets) - 1):
        if step % layers == 0 and fresh[step // layers]:
            accesses.append([])
        accesses[-1] += [(step % layers, e) for e in demand.step(step).expert]
    every = [[(layer, e) for e in range(case.trace.geometry.experts)] for layer in range(layers)]
    pools = every if bound.scope == "per_layer" else [[x for each in every for x in each]]
    best = np.zeros(2, int)
    for experts, slots in zip(pools, bound.slots, strict=True):
        tried = combinations(experts, min(slots, len(experts)))
        if len(experts) > 12:  # too many sets to try: those of the most accesses are among the drawn
            dice = random.Random(0)
            tried = [tuple(dice.sample(experts, min(slots, len(experts)))) for _ in range(200)]
        best += np.max([hits_of(accesses, set(each), set(bound.warm)) for each in tried], axis=0)
    found = fixed_set(case.trace, bound)
    if max(map(len, pools)) <= 12:
        assert found == tuple(best)
    assert (np.array(found) >= best).all()
    relaxed = count(case.trace, bound)["belady_hits"]
    assert relaxed is not None and found is not None and found.loaded_once <= relaxed


def unequal(case: Case, dice: random.Random) -> Case:
    """The same demand of layers that differ in bytes, in one pool of any capacity; five layers' bytes at most."""
    geometry = case.trace.geometry
    each = tuple(dice.randint(1, 5) for _ in range(geometry.layers))
    header = case.trace.header.model_copy(update={"geometry": geometry.model_copy(update={"expert_bytes": each})})
    trace = memory_trace(header, [case.trace.request(at) for at in range(case.trace.requests)])
    capacity = f"{dice.randint(max(each), geometry.experts * sum(each))}B"
    return case._replace(
        trace=trace, config=case.config.model_copy(update={"scope": "global", "capacity": capacity, "warm": ()})
    )


@searched(60)
@given(cases(evictions=("lru",), prefetches=("none",)), st.randoms(use_true_random=False))
def test_of_unequal_bytes_no_set_that_fits_hits_more_and_one_hits_as_often(case: Case, dice: random.Random) -> None:
    case = unequal(case, dice)
    bound, geometry = case.relaxed, case.trace.geometry
    accesses: list[list[tuple[int, int]]] = [[]]
    demand, fresh = demand_of(case.trace, bound.passes), fresh_of(case)
    for step in range(len(demand.offsets) - 1):
        layer = step % geometry.layers
        if layer == 0 and fresh[step // geometry.layers]:
            accesses.append([])
        accesses[-1] += [(layer, e) for e in demand.step(step).expert]
    experts = [(layer, e) for layer in range(geometry.layers) for e in range(geometry.experts)]
    if not bound.sizes or len(experts) > 12:
        return
    best = np.zeros(2, int)
    for kept in product((False, True), repeat=len(experts)):
        chosen = {x for x, stays in zip(experts, kept, strict=True) if stays}
        if sum(geometry.expert_bytes[layer] for layer, _ in chosen) <= bound.pool:
            best = np.maximum(best, hits_of(accesses, chosen, set()))
    assert fixed_set(case.trace, bound) == tuple(best)


@searched(60)
@given(cases(), st.randoms(use_true_random=False))
def test_of_unequal_bytes_no_replay_is_faster_than_the_least_time(case: Case, dice: random.Random) -> None:
    case = unequal(case, dice)
    least, result = case.least(), case.run("reference")
    assert least.time_ns <= result.totals["time_ns"]
    assert least.decode_ns <= sum(row["decode_ns"] for row in result.per_request)


def fresh_of(case: Case) -> np.ndarray:
    from moereplay.simulator.curves.stream import demands_of

    return demands_of(case.trace, case.config.schedule, case.config.reset).fresh


def test_a_preloaded_set_hits_what_a_replay_of_it_hits() -> None:
    trace = random_trace(5, Sizes(layers=2, experts=6, k=2, tokens=30, prompt=0, requests=1, depth=0, size=1))
    bound = bound_of(trace, configure(capacity="5B"))
    assert bound is not None
    demand = demand_of(trace, "recorded")
    unit = [(step % 2, e) for step in range(len(demand.offsets) - 1) for e in demand.step(step).expert]
    best = sorted(set(unit), key=lambda x: -unit.count(x))
    config = configure(capacity="5B", eviction="static:profile=given", warm=best[:5], profile=best)
    ready = plan(trace, config)
    found = fixed_set(trace, bound)
    assert (
        found is not None
        and replay_source(ready.spec(log=False).source_of(trace), ready).totals["hits"] == found.preloaded
    )


def test_the_cost_of_loading_may_leave_nothing() -> None:
    trace = trace_of([[[0]], [[1]], [[2]], [[0]]], experts=3)
    bound = bound_of(trace, configure(capacity="1B"))
    assert bound is not None
    assert fixed_set(trace, bound) == (2, 1)
    assert fixed_set(trace, replace(bound, warm=((0, 0),))) == (2, 2)


# ---------------------------------------------------------------- no replay is faster


def decode_ns(result: Result) -> tuple[int, int]:
    """Summed over requests, and their decode passes."""
    rows = result.per_request
    return sum(row["decode_ns"] for row in rows), sum(row["decode_tokens"] for row in rows)


def assert_not_faster(case: Case, engine: str) -> None:
    least, result = case.least(), case.run(engine)
    assert result.totals["misses"] >= 0
    assert least.time_ns <= result.totals["time_ns"]
    spent, passes = decode_ns(result)
    assert least.decode_ns <= spent and least.decode_tokens == passes


@searched(60)
@given(cases())
def test_no_replay_of_the_reference_is_faster(case: Case) -> None:
    assert_not_faster(case, "reference")


@searched(60)
@given(cases(evictions=("lru", "belady", "static"), prefetches=("none", "oracle", "top_k")))
def test_no_compiled_replay_is_faster(case: Case) -> None:
    assert_not_faster(case, "compiled")


@searched(60)
@given(cases(evictions=("belady", "belady:bypass=true"), prefetches=("none",)))
def test_without_links_to_wait_for_it_is_what_compute_takes(case: Case) -> None:
    endless = machine(bytes_per_ns=float("inf"), dense_ns=3, expert_ns=2, expert_ns_per_token=1, pass_ns=4)
    swift = case._replace(where=endless)
    result = swift.run("reference")
    assert swift.least()[:2] == (result.totals["time_ns"], decode_ns(result)[0])


def test_bytes_that_no_cache_avoids_must_cross_before_the_last_of_them_is_computed() -> None:
    # one slot, 10 ns each, compute 1: two transfers and an expert until 21; then 0 and 1 are to come, of which one is
    # not cached, so that another transfer and its expert follow
    trace = trace_of([[[e]] for e in (0, 1, 0, 1)], experts=2)
    where = machine(bytes_per_ns=0.1, expert_ns=1)
    case = Case(trace, configure(capacity="1B"), where)
    assert case.least() == LeastTime(32, 32, 4)
    assert case.run("reference").totals["time_ns"] == 44
    # what is prefetched behind an early miss still has to be computed after it: 10 ns, then all ten experts' compute
    long = trace_of([[[0]], *([[0]] for _ in range(9))], experts=2)
    assert Case(long, configure(capacity="1B"), where).least().time_ns == 20


def test_a_cache_that_was_prepared_cannot_serve_all_that_follows() -> None:
    # 40 tokens compute for 400 ns after a transfer of 100; of the next 40 one expert may be there, and 30 more miss
    rows = [[[0]] for _ in range(40)] + [[[e % 4 + 1]] for e in range(40)]
    case = Case(trace_of(rows, experts=5), configure(capacity="1B"), machine(bytes_per_ns=0.01, expert_ns=10))
    assert case.least().time_ns == 100 + 400 + 30 * 100 + 2 * 10
    assert case.least().time_ns > 32 * 100 + 10  # all bytes that no cache avoids, from the start on
    assert case.least().time_ns <= case.run("reference").totals["time_ns"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_links_carry_no_faster_than_their_wires_and_depth(depth: int) -> None:
    geometry = sizes(1, 4, 1, 2)
    where = machine(bytes_per_ns=1, latency_ns=5, depth=depth, more=[Link(bytes_per_s=0.5e9, depth=1)])
    found = carried(Times(where, geometry, (geometry.expert_bytes,)), 8).tolist()
    ends = sorted([_last_end(n, 5, 2, depth) for n in range(1, 9)] + [4 * n for n in range(1, 9)])
    assert found == [0, *ends[:8]]


def _last_end(transfers: int, latency: int, wire: int, depth: int) -> int:
    """By the rule of docs/semantics.md: issued as soon as fewer than `depth` are under way."""
    ends: list[int] = []
    for at in range(transfers):
        issued = ends[at - depth] if at >= depth else 0
        ends.append(max(issued + latency, ends[-1] if ends else 0) + wire)
    return ends[-1]
