"""The bound beside a result: the best of all ways to evict, found by trying them all, and never beaten by a replay."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moereplay.simulator.bounds import FORCED, RELAXED, Bound, bound_of, bound_remarks, count, judge
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.replay import plan, replay_source
from moereplay.simulator.source import TraceSource
from moereplay.sweeps.grid import run_grid
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Geometry, Trace, memory_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.cases import sizes
from tests.kit.every import every
from tests.kit.search import searched
from tests.simulator.test_curves import Scenario, scenarios, trace_of

Expert = tuple[int, int]
State = frozenset[Expert]

# ---------------------------------------------------------------- all ways to evict


#: Bytes of an expert, by layer or by expert.
Each = Sequence[int] | Mapping[Expert, int]


def bytes_of(x: Expert, each: Each) -> int:
    return each[x] if isinstance(each, Mapping) else each[x[0]]


def subsets(of: Sequence[Expert], room: int, each: Each) -> Iterator[State]:
    """Every choice of experts (layer, expert) that fits into so many bytes."""
    if not of:
        yield frozenset()
        return
    first, *others = of
    yield from subsets(others, room, each)
    if (size := bytes_of(first, each)) <= room:
        yield from (chosen | {first} for chosen in subsets(others, room - size, each))


def most_hits(steps: Sequence[State], pool: int, each: Each, admission: str, start: State = frozenset()) -> int:
    """Search all sequences of contents that a pool of that size may have after each step."""
    best = {start: 0}
    for demanded in steps:
        after: dict[State, int] = {}
        needed = sum(bytes_of(x, each) for x in demanded)
        stays = demanded if admission == FORCED and needed <= pool else frozenset()
        room = pool - (needed if stays else 0)
        for held, hits in best.items():
            free = demanded if admission == FORCED and needed > pool else (held | demanded) - stays
            for chosen in subsets(sorted(free), room, each):
                state = stays | chosen
                after[state] = max(after.get(state, 0), hits + len(held & demanded))
        best = after
    return max(best.values())


def steps_of(trace: Trace, bound: Bound) -> list[list[State]]:
    """Return the demand of each pool by step; a reset begins a new list."""
    demand, layers = demand_of(trace, bound.passes), trace.geometry.layers
    pools: dict[int, list[State]] = {}
    for step in range(len(demand.offsets) - 1):
        layer = step % layers
        asked = [(layer, e) for e in demand.step(step).expert]
        groups = [asked] if bound.contract == "atomic" else [[x] for x in asked]
        pools.setdefault(layer if bound.scope == "per_layer" else 0, []).extend(map(frozenset, groups))
    return list(pools.values())


def drawn(dice: random.Random) -> Trace:
    layers, experts = dice.choice(((1, 4), (1, 5), (2, 3)))
    k = dice.randint(1, 3)
    cells = [[dice.sample(range(experts), k) for _ in range(layers)] for _ in range(dice.randint(2, 9))]
    return trace_of(cells, experts)


@every("admission", [FORCED, RELAXED])
@every("contract", ["atomic", "sequential"])
@every("scope", ["global", "per_layer"])
def test_no_way_to_evict_hits_more_and_one_hits_as_often(scope: str, contract: str, admission: str) -> None:
    dice, fewer = random.Random(7), 0
    for _ in range(30):
        trace = drawn(dice)
        units = trace.geometry.experts * (1 if scope == "per_layer" else trace.geometry.layers)
        slots = dice.randint(1, units)
        pools = trace.geometry.layers if scope == "per_layer" else 1
        bound = Bound(admission, "token", "never", scope, contract, (slots,) * pools, ())
        each = (1,) * trace.geometry.layers
        most = sum(most_hits(steps, slots, each, admission) for steps in steps_of(trace, bound))
        assert count(trace, bound)["belady_hits"] == most
        fewer += most < demand_of(trace, "token").expert.size - units
    assert fewer > 5


def test_what_is_warm_counts_from_the_start() -> None:
    dice, gained = random.Random(3), 0
    for _ in range(20):
        trace = drawn(dice)
        warm = ((0, 0), (trace.geometry.layers - 1, 2))
        for admission in (FORCED, RELAXED):
            bound = Bound(admission, "token", "never", "global", "atomic", (2,), warm)
            (steps,) = steps_of(trace, bound)
            found = count(trace, bound)
            assert found["belady_hits"] == most_hits(steps, 2, (1, 1), admission, frozenset(warm))
            assert found["compulsory"] == len(frozenset().union(*steps) - set(warm))
            gained += found["belady_hits"] != count(trace, replace(bound, warm=()))["belady_hits"]
    assert gained > 5


@searched(50)
@given(scenarios(), st.integers(1, 6))
def test_a_reset_begins_anew(scenario: Scenario, slots: int) -> None:
    """Requests one after the other, each from cold, hit as often as each alone."""
    trace, scope, passes = scenario.trace, scenario.how["scope"], scenario.how["passes"]
    assume(not passes.startswith("batch"))
    pools = trace.geometry.layers if scope == "per_layer" else 1
    whole = Bound(RELAXED, passes, "request", scope, "atomic", (slots,) * pools, ())
    alone = [memory_trace(trace.header, [trace.request(at)]) for at in range(trace.requests)]
    together, apart = dict(count(trace, whole)), [count(each, replace(whole, reset="never")) for each in alone]
    assert together.pop("feasible_hits") is None
    assert together == {name: sum(each[name] or 0 for each in apart) for name in together}


# ---------------------------------------------------------------- no replay beats it

FORCING = ("lru", "lfu", "fifo", "mru", "random", "arc", "belady", "least_stale", "s3fifo")
DECLINING = ("belady:bypass=true", "belady:bypass=ties", "static", "pinned:share=.6")
MISSES = ("fetch", "fetch:bits=4", "drop:keep=1", "drop:keep=0")


def hits_of(scenario: Scenario, config: ReplayConfig) -> int:
    """On the scenario's machine."""
    ready = replace(plan(scenario.trace, config), machine=scenario.where)
    source = TraceSource(scenario.trace, config.schedule, ready.chosen.prefetch, ready.chosen.needs)
    return replay_source(source, ready).totals["hits"]


@pytest.mark.parametrize("contract", ["atomic", "sequential"])
@searched(50)
@given(scenarios(one_size=True), st.sampled_from(FORCING + DECLINING), st.sampled_from(MISSES), st.data())
def test_no_replay_without_prefetch_beats_its_bound(
    contract: str, scenario: Scenario, eviction: str, miss: str, data: st.DataObject
) -> None:
    # steps that do not fit their pool among them, where the machine's times decide what is left
    capacity = f"{data.draw(st.sampled_from(scenario.every_byte))}B"
    scope = "global" if int(capacity[:-1]) < sum(scenario.trace.geometry.expert_bytes) else scenario.how["scope"]
    how = scenario.how | {"contract": contract, "capacity": capacity, "scope": scope}
    config = configure(eviction=eviction, miss=miss, **how)
    bound = bound_of(scenario.trace, config)
    assert bound is not None
    most = count(scenario.trace, bound)["belady_hits"]
    assert most is None or hits_of(scenario, config) <= most
    forced = eviction in FORCING and miss.startswith("fetch")
    assert bound.admission in ("", FORCED if forced else RELAXED)


@searched(50)
@given(scenarios(one_size=True, passes="token"))
def test_belady_is_the_forced_bound_where_steps_fit_and_never_more_than_the_relaxed_one(scenario: Scenario) -> None:
    made = scenario.curve("belady")
    for at, decided in enumerate(made.decided):
        config = made.config.model_copy(update={"capacity": f"{made.capacity_bytes[at]}B"})
        bound = bound_of(scenario.trace, config)
        assert bound is not None
        forced, relaxed = (
            count(scenario.trace, replace(bound, admission=each))["belady_hits"] for each in (FORCED, RELAXED)
        )
        assert forced is not None and relaxed is not None and forced <= relaxed
        if decided:
            assert forced == made.accesses - made.misses[at]


@searched(50)
@given(scenarios(one_size=True))
def test_the_relaxed_curve_is_the_relaxed_bound_at_every_capacity(scenario: Scenario) -> None:
    made = scenario.curve("relaxed_belady")
    assert made.decided.all()
    for at, capacity in enumerate(made.capacity_bytes.tolist()):
        bound = bound_of(scenario.trace, made.config.model_copy(update={"capacity": f"{capacity}B"}))
        assert bound is not None
        assert (
            count(scenario.trace, replace(bound, admission=RELAXED))["belady_hits"] == made.accesses - made.misses[at]
        )


def test_forced_admission_costs_a_hit_that_the_relaxed_bound_keeps() -> None:
    # one slot: 0 1 0 2 0. Forced, each pushes the one before out; relaxed, 0 stays. Two at once: after 0 1 with a slot
    # for one, the relaxed bound has kept the one that is used next
    trace = trace_of([[[e]] for e in (0, 1, 0, 2, 0)], experts=3)
    assert curve(trace, "belady").misses.tolist() == [5, 3, 3]
    assert curve(trace, "relaxed_belady").misses.tolist() == [3, 3, 3]
    both = trace_of([[[0, 1]], [[1, -1]]], experts=2)
    assert curve(both, "belady").decided.tolist() == [False, True]
    assert curve(both, "relaxed_belady").misses.tolist() == [2, 2]


# ---------------------------------------------------------------- beside a result

UNEVEN = Geometry(layers=3, experts=6, k=2, expert_bytes=(1000, 2000, 3000))


def synthetic(geometry: Geometry | None = None) -> Trace:
    shape = geometry or sizes(3, 6, 2, 1000)
    drawn = Synthetic(kind="zipf", geometry=shape, requests=2, prompt_tokens=1, decode_tokens=30, recall=(0.8,))
    return synthesise(drawn)


def beside(trace: Trace, **settings: str) -> tuple[float, float | None, float | None]:
    """Hit rate, its bound and the compulsory limit."""
    [(result, bound)] = run_grid(trace, [configure(capacity="30%", **settings)], engine="reference")
    accesses = result.totals["accesses"]
    if bound is None:
        return result.totals["hits"] / accesses, None, None
    most, compulsory = bound["belady_hits"], bound["compulsory"] or 0
    return result.totals["hits"] / accesses, None if most is None else most / accesses, 1 - compulsory / accesses


@every("eviction", ["static", "pinned"])
def test_what_declines_hits_more_than_forced_admission_can_and_is_beside_a_bound_that_may_too(eviction: str) -> None:
    trace, config = synthetic(sizes(4, 8, 2, 1000)), configure(capacity="2experts", eviction=eviction)
    [(result, bound)] = run_grid(trace, [config], engine="reference")
    of = bound_of(trace, config)
    assert of is not None and bound is not None
    assert count(trace, replace(of, admission=FORCED))["belady_hits"] == 0
    assert 0 < result.totals["hits"] <= (bound["belady_hits"] or 0)


@every(
    "settings, why",
    [
        ({"miss": "cascade:bits=4/2"}, "no belady where a pool holds experts at several precisions: cascade:bits=4/2"),
        ({"miss": "lowest_bit"}, "no belady where a pool holds experts at several precisions: lowest_bit"),
        ({"routing": "cache_prior"}, "no belady where routing changes the demand: cache_prior"),
    ],
)
def test_where_bytes_or_demand_differ_the_bound_is_blank_and_a_line_says_why(settings: dict, why: str) -> None:
    trace = synthetic()
    hit_rate, most, limit = beside(trace, **settings)
    assert most is None and (limit is None) == ("routing" in settings)
    assert limit is None or hit_rate <= limit
    config = configure(capacity="30%", **settings)
    assert bound_remarks(trace, [config, configure(capacity="40%", **settings)]) == [why]


@every("scope", ["global", "per_layer"])
def test_layers_of_unequal_bytes_have_a_bound(scope: str) -> None:
    trace = synthetic(UNEVEN)
    hit_rate, most, limit = beside(trace, scope=scope)
    assert most is not None and limit is not None and 0 < hit_rate <= most <= limit
    bound = bound_of(trace, configure(scope=scope, capacity="30%"))
    assert bound is not None and (count(trace, bound)["feasible_hits"] is not None) == (scope == "global")
    assert bound_remarks(trace, [configure(scope=scope, capacity="30%")]) == []
    everything = bound_of(trace, configure(scope=scope, capacity="100%", resident=((0, -1),)))
    assert everything is not None
    counted = count(trace, everything)  # residents hit, of the others each misses once
    assert counted["feasible_hits"] in (None, counted["belady_hits"])


def test_a_bound_has_the_bytes_of_its_result() -> None:
    trace, inside = synthetic(), "side_buffer:buffers=2:count=inside"

    def slots(**settings: str) -> tuple[int, ...]:
        bound = bound_of(trace, configure(capacity="50%", **settings))
        return () if bound is None else bound.slots

    assert slots() == (9,)
    assert slots(miss="fetch:bits=4") == slots(miss="fetch:bits=4", eviction="static") == (36,)
    assert slots(prefetch=inside) == (7,)
    assert slots(prefetch=inside.replace("inside", "beside")) == (9,)
    assert slots(scope="per_layer") == (3, 3, 3)


def test_bounds_of_other_counts_have_other_identities() -> None:
    trace, more = synthetic(), [{"reset": "request"}, {"scope": "per_layer"}, {"contract": "sequential"}]
    placed = [{name: (pair,)} for name in ("warm", "resident") for pair in ((0, 0), (0, 1))]
    bounds = [bound_of(trace, configure(capacity="50%", **each)) for each in ({}, *more, *placed)]
    assert len({bound.identity(trace) for bound in bounds if bound}) == len(bounds)


def test_what_needs_no_remark_has_none() -> None:
    configs = [configure(eviction=each, prefetch="top_k", capacity="40%") for each in ("lru", "belady", "arc")]
    assert bound_remarks(synthetic(), configs) == []
    assert judge(synthetic(), configs[0]).bound == judge(synthetic(), configs[1]).bound
