"""Bounds where experts of a pool differ in bytes: the best way lies between their ends, and no replay passes them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.bounds import FORCED, RELAXED, Bound, bound_of, count
from moereplay.simulator.config import configure
from moereplay.simulator.curves import stream, unequal
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.curves.stream import Cut, Demands, Stays, demands_of, stays_of
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.cases import sizes
from tests.kit.every import every
from tests.kit.search import searched
from tests.simulator.test_bounds import DECLINING, FORCING, MISSES, hits_of, most_hits, steps_of
from tests.simulator.test_curves import Scenario, scenarios, trace_of

# ---------------------------------------------------------------- all ways to evict


def drawn(dice: random.Random) -> Trace:
    layers, experts = dice.choice(((2, 3), (3, 2)))
    k = dice.randint(1, 2)
    cells = [[dice.sample(range(experts), k) for _ in range(layers)] for _ in range(dice.randint(2, 7))]
    return trace_of(cells, experts, [dice.randint(1, 6) for _ in range(layers)])


def bound_at(trace: Trace, pool: int, admission: str, contract: str, warm: tuple = ()) -> Bound:
    each = trace.geometry.expert_bytes
    return Bound(admission, "token", "never", "global", contract, (pool // min(each),), warm, pool, each)


@pytest.mark.slow
@every("admission", [FORCED, RELAXED])
@every("contract", ["atomic", "sequential"])
def test_the_most_hits_of_all_ways_lie_between_the_ends(contract: str, admission: str) -> None:
    dice, known, met = random.Random(11), 0, 0
    for _ in range(60):
        trace = drawn(dice)
        each = trace.geometry.expert_bytes
        pool = dice.randint(max(each), sum(each) * trace.geometry.experts)
        warm = ((0, 0),) if dice.random() < 0.3 else ()
        bound = bound_at(trace, pool, admission, contract, warm)
        (steps,) = steps_of(trace, bound)
        most, found = most_hits(steps, pool, each, admission, frozenset(warm)), count(trace, bound)
        least, limit = found["feasible_hits"], found["belady_hits"]
        assert limit is not None
        if len(set(each)) == 1:  # then `sizes` of a bound are empty, and it is Belady's
            continue
        assert least is not None and least <= most <= limit
        known, met = known + 1, met + (least == limit)
    assert known > 40 and met > known // 2


def test_a_large_expert_makes_way_for_two_small_ones() -> None:
    # 3 bytes in layer 0, 2 in layer 1. Expert (0, 0) is used again after everything else, as Belady would see it; but
    # of 4 bytes it leaves room for none of the small ones, and they hit twice where it would hit once.
    trace = trace_of([[[0], [0]], [[-1], [1]], [[-1], [0]], [[-1], [1]], [[0], [-1]]], experts=2, expert_bytes=[3, 2])
    found = count(trace, bound_at(trace, 4, FORCED, "atomic"))
    assert (found["belady_hits"], found["feasible_hits"], found["accesses"]) == (2, 2, 6)
    # with a byte less only one of the small ones stays, and while the other is computed there is no room beside it
    found = count(trace, bound_at(trace, 3, FORCED, "atomic"))
    assert (found["belady_hits"], found["feasible_hits"]) == (0, 0)


def test_stays_of_a_step_that_does_not_fit_lie_on_a_place_of_their_own() -> None:
    # both layers' pool has 5 bytes; the second step demands 3 x 2, so nothing stays over it, and at most two leave it
    trace = trace_of([[[0, -1, -1], [0, 1, 2]], [[0, -1, -1], [0, 1, 2]]], experts=3, expert_bytes=[1, 2])
    demands, cut = demands_of(trace, "token", "never"), Cut(2, 3, per_layer=False, atomic=True)
    stays = stays_of(demands, cut, (1, 2), 5, forced=True)
    assert stays.room.tolist() == [4, 0, 5, 4, 0, 5]
    assert list(zip(stays.begin.tolist(), stays.end.tolist(), strict=True)) == [(1, 3), (2, 4), (2, 4), (2, 4)]
    assert unequal.most_hits(demands, cut, (1, 2), 5, True) == (2, 2)
    relaxed = stays_of(demands, cut, (1, 2), 5, forced=False)
    assert relaxed.room.tolist() == [5] * 4
    assert list(zip(relaxed.begin.tolist(), relaxed.end.tolist(), strict=True)) == [(0, 2), (1, 3), (1, 3), (1, 3)]


# ---------------------------------------------------------------- a slow obvious model: the linear program


def by_linear_program(stays: Stays) -> float:
    """The most hits if a stay could be kept in part: FOO, as a program of stays and of what is held at each place."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix, eye_array, hstack

    many, places = len(stays.size), len(stays.room)
    inside = stays.end < places
    rows = np.concatenate([stays.begin, stays.end[inside]])
    columns = np.concatenate([np.arange(many), np.arange(many)[inside]])
    change = csr_matrix((np.concatenate([stays.size, -stays.size[inside]]), (rows, columns)), (places, many))
    held = eye_array(places) - eye_array(places, k=-1)
    found = linprog(
        np.concatenate([-np.ones(many), np.zeros(places)]),
        A_eq=hstack([change, -held]).tocsr(),
        b_eq=np.zeros(places),
        bounds=[*[(0, 1)] * many, *((0, int(room)) for room in stays.room)],
        method="highs",
    )
    return stays.always - found.fun


MIXED = sizes(6, 16, 2, [72, 83, 72, 72, 83, 83])


def mixed(tokens: int, seed: int = 1) -> Demands:
    made = Synthetic(kind="zipf", geometry=MIXED, requests=2, prompt_tokens=1, decode_tokens=tokens, seed=seed)
    return demands_of(synthesise(made), "token", "never")


@every("forced", [True, False])
def test_the_limit_is_nearly_the_linear_programs(forced: bool) -> None:
    demands, cut = mixed(150), Cut(6, 16, per_layer=False, atomic=True)
    for share in (0.1, 0.25, 0.5):
        pool = int(share * 16 * sum(MIXED.expert_bytes))
        program = by_linear_program(stays_of(demands, cut, MIXED.expert_bytes, pool, forced))
        found = unequal.most_hits(demands, cut, MIXED.expert_bytes, pool, forced)
        accesses = len(demands.expert)
        assert int(program + 1e-6) <= found.at_most < program + 0.002 * accesses
        assert program - 0.02 * accesses < found.at_least <= program + 1e-6  # ten experts fit into a tenth


@every("forced", [True, False])
@every("atomic", [True, False])
def test_with_equal_bytes_the_way_is_beladys(atomic: bool, forced: bool) -> None:
    dice = random.Random(5)
    for _ in range(20):
        trace = drawn(dice)
        layers, experts = trace.geometry.layers, trace.geometry.experts
        demands, cut = demands_of(trace, "token", "never"), Cut(layers, experts, per_layer=False, atomic=atomic)
        slots = dice.randint(1, layers * experts)
        hits, _, _ = stream.count(demands, cut, (slots,), forced)
        found = unequal.most_hits(demands, cut, (7,) * layers, 7 * slots + dice.randint(0, 6), forced)
        assert found.at_least == hits <= found.at_most


def test_a_bound_is_the_same_whatever_the_unit_of_bytes() -> None:
    demands, cut, pool = mixed(40), Cut(6, 16, per_layer=False, atomic=True), 16 * 100
    found = unequal.most_hits(demands, cut, MIXED.expert_bytes, pool, False)
    large = [size << 33 for size in MIXED.expert_bytes]  # 618 GB: products of bytes and prices pass 64 bits
    assert unequal.most_hits(demands, cut, large, pool << 33, False) == found
    prime = [(size << 33) + size % 2 for size in MIXED.expert_bytes]  # no common unit: 83 << 33, and one more
    near = unequal.most_hits(demands, cut, prime, pool << 33, False)
    assert near.at_least <= found.at_most and abs(near.at_most - found.at_most) <= 2


# ---------------------------------------------------------------- no replay beats it


def beaten_by(scenario: Scenario, contract: str, eviction: str, miss: str, capacity: int) -> tuple[int, int | None]:
    """Hits of a replay and their bound."""
    how = scenario.how | {"contract": contract, "capacity": f"{capacity}B", "scope": "global"}
    config = configure(eviction=eviction, miss=miss, **how)
    bound = bound_of(scenario.trace, config)
    assert bound is not None
    found = count(scenario.trace, bound)
    feasible, most = found["feasible_hits"], found["belady_hits"]
    assert feasible is None or (most is not None and feasible <= most)
    assert (feasible is not None) == bool(bound.sizes)
    return hits_of(scenario, config), most


@pytest.mark.parametrize("contract", ["atomic", "sequential"])
@searched(50)
@given(scenarios(), st.sampled_from(FORCING + DECLINING), st.sampled_from(MISSES), st.data())
def test_no_replay_without_prefetch_beats_its_bound(
    contract: str, scenario: Scenario, eviction: str, miss: str, data: st.DataObject
) -> None:
    hits, most = beaten_by(scenario, contract, eviction, miss, data.draw(st.sampled_from(scenario.every_byte)))
    assert most is None or hits <= most


@pytest.mark.long
def test_no_replay_beats_its_bound_in_many_scenarios() -> None:
    assert unequal_among(2_000, seed=1) > 1_000


def unequal_among(many: int, seed: int) -> int:
    """Replay so many random scenarios; return how many had experts of unequal bytes, with few that are alike."""
    from tests.simulator.test_curves import _machine, _trace

    dice, unlike = random.Random(seed), 0
    for _ in range(many):
        how = {"passes": dice.choice(("recorded", "token", "chunk:2", "batch:2"))}
        how |= {"reset": dice.choice(("never", "request", "3"))}
        scenario = Scenario(_trace(dice, one_size=False), how, _machine(dice))
        settings = dice.choice(("atomic", "sequential")), dice.choice(FORCING + DECLINING), dice.choice(MISSES)
        hits, most = beaten_by(scenario, *settings, dice.choice(scenario.every_byte))
        assert most is None or hits <= most, (scenario, settings)
        unlike += len(set(scenario.trace.geometry.expert_bytes)) > 1
    return unlike


# ---------------------------------------------------------------- beside results and in curves


def test_layers_of_unequal_bytes_in_one_pool_have_a_bound_near_what_belady_reaches() -> None:
    drawn = Synthetic(kind="zipf", geometry=MIXED, requests=2, prompt_tokens=1, decode_tokens=100)
    trace, found = synthesise(drawn), {}
    for eviction in ("lru", "belady"):
        config = configure(capacity="30%", eviction=eviction, passes="token")
        bound = bound_of(trace, config)
        assert bound is not None and bound.sizes and bound.admission == FORCED
        assert bound.identity(trace) != replace(bound, sizes=(), pool=0).identity(trace)
        found[eviction] = replay(trace, config).totals["hits"], count(trace, bound)
    (hits, one), (best, other) = found["lru"], found["belady"]
    assert one == other and hits < best <= (one["feasible_hits"] or 0) + 2 <= (one["belady_hits"] or 0) + 2
    assert (one["belady_hits"] or 0) - best < 0.01 * (one["accesses"] or 0)


@searched(50)
@given(scenarios(scope="global"))
def test_the_relaxed_curve_is_the_bound_at_the_capacities_that_are_asked_for(scenario: Scenario) -> None:
    each = scenario.trace.geometry.expert_bytes
    asked = [max(each), sum(each), 2 * sum(each), 1]
    how: dict[str, Any] = dict(scenario.how)
    made = curve(scenario.trace, "relaxed_belady", **how, capacities=asked)
    assert made.decided.all() and (made.bracket is not None) == (len(set(each)) > 1)
    lru = curve(scenario.trace, "lru", **how, capacities=asked)
    assert made.layer_accesses.tolist() == lru.layer_accesses.tolist()
    assert made.layer_compulsory.tolist() == lru.layer_compulsory.tolist()
    for capacity in asked[:3]:
        if capacity not in made.capacity_bytes:
            continue
        config = made.config.model_copy(update={"capacity": f"{capacity}B"})
        bound = bound_of(scenario.trace, config)
        assert bound is not None
        found = count(scenario.trace, replace(bound, admission=RELAXED))
        assert made.misses_at(capacity) == made.accesses - (found["belady_hits"] or 0)


def test_a_relaxed_curve_of_unequal_bytes_asks_for_its_capacities() -> None:
    trace = trace_of([[[0], [0]], [[1], [0]]], experts=2, expert_bytes=[3, 2])
    for capacities in ((), (2,)):
        with pytest.raises(ConfigError, match=r"capacities= .* at least 3"):
            curve(trace, "relaxed_belady", capacities=capacities)
    made = curve(trace, "relaxed_belady", capacities=[3, 4])
    assert made.capacity_bytes.tolist() == [3, 4] and made.misses.tolist() == [3, 3]
    with pytest.raises(ConfigError, match="no capacity of 5 bytes"):
        made.misses_at(5)


def test_demand_of_nothing_has_a_bound_of_nothing() -> None:
    trace = trace_of([[[-1], [-1]], [[-1], [-1]]], experts=2, expert_bytes=[3, 2])
    assert demand_of(trace, "token").expert.size == 0
    found = count(trace, bound_at(trace, 4, RELAXED, "atomic"))
    assert (found["belady_hits"], found["feasible_hits"], found["accesses"]) == (0, 0, 0)
