"""Complete steps: those that demand something and have no miss, in replays, curves and bounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.bounds import RELAXED, Bound, bound_of
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.limits.limits import complete_steps
from moereplay.simulator.replay import replay
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Trace
from tests.digests.runs import trace_of
from tests.kit.cases import Cell, ListSource, Prompted, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.search import searched
from tests.simulator.test_bounds import State, steps_of, subsets
from tests.simulator.test_curves import Scenario, scenarios
from tests.simulator.test_curves import trace_of as trace_of_rows

#: A schedule of each trace whose steps fit the pool.
PASSES = {"sample": "recorded", "prefill": "recorded", "unequal": "token"}
TRACES = every("name", list(PASSES))


def counted(trace: Trace, passes: str, capacity: int) -> tuple[Counter[int], Counter[int]]:
    """Steps and complete steps by layer under LRU, from a dictionary of what is there, in order of last use."""
    geometry, demand, there = trace.geometry, demand_of(trace, passes), dict[tuple[int, int], int]()
    steps, complete, held = Counter[int](), Counter[int](), 0
    for step in range(len(demand.offsets) - 1):
        layer = step % geometry.layers
        wanted = [(layer, int(e)) for e in demand.step(step).expert]
        if not wanted:
            continue
        steps[layer] += 1
        complete[layer] += all(x in there for x in wanted)
        for x in wanted:
            held += geometry.expert_bytes[layer] - there.pop(x, 0)
            there[x] = geometry.expert_bytes[layer]
        while held > capacity:
            held -= there.pop(next(iter(there)))
    return steps, complete


@pytest.mark.slow
@TRACES
def test_both_engines_count_what_plain_python_counts(name: str) -> None:
    trace, passes = trace_of(name), PASSES[name]
    config = configure(capacity="60%", passes=passes)
    first, other = (replay(trace, config, engine=engine) for engine in ("compiled", "reference"))
    known, found = counted(trace, passes, first.about["capacity_bytes"]), (Counter[int](), Counter[int]())
    for row in first.per_layer:
        for counter, column in zip(found, ("steps", "complete_steps"), strict=True):
            counter[row["layer"]] += row[column]
    assert found == known
    assert 0 < first.totals["complete_steps"] == known[1].total() < known[0].total()
    assert (first.totals, first.per_layer, first.per_request) == (other.totals, other.per_layer, other.per_request)


@pytest.mark.slow
@TRACES
def test_a_curve_has_what_plain_python_counts_at_every_capacity(name: str) -> None:
    trace, passes = trace_of(name), PASSES[name]
    made = curve(trace, passes=passes)
    for at in np.flatnonzero(made.decided)[:: max(1, len(made.capacity_bytes) // 8)].tolist():
        steps, complete = counted(trace, passes, int(made.capacity_bytes[at]))
        assert dict(enumerate(made.layer_steps.tolist())) == steps
        assert dict(enumerate(made.layer_complete[:, at].tolist())) == complete


def test_a_step_without_demand_is_none_and_a_miss_of_several_leaves_it_incomplete() -> None:
    # one layer: 0 1 miss, 0 1 hit, nothing is demanded, 0 hits and 2 misses
    source = ListSource(sizes(1, 4, 2), [Prompted(tokens([[0, 1]], [[0, 1]], [[-1, -1]], [[0, 2]]))])
    assert replay_lists(source, 4, machine()).counts("steps", "complete_steps", "accesses") == (3, 1, 6)


def test_a_step_that_waits_for_its_prefetch_is_complete() -> None:
    # the gate of layer 0 suggests (1, 2), whose 4 ns have not passed when layer 1 demands it
    token = [Cell([0, -1], look=[naming(4, [2])]), Cell([2, -1])]
    source = ListSource(sizes(2, 4, 2, expert_bytes=4), [Prompted([token])])
    outcome = replay_lists(source, 64, machine(dense_ns=1, expert_ns=1), prefetch="top_k:factor=.5")
    assert outcome.counts("late", "misses", "complete_steps") == (1, 1, 1)


@every("miss, executed", [("cpu", "cpu_executed"), ("drop:keep=0", "dropped")])
def test_a_miss_that_is_not_fetched_is_still_one(miss: str, executed: str) -> None:
    source = ListSource(sizes(1, 4, 2), [Prompted(tokens([[0, 1]], [[0, 2]], [[0, 1]]))])
    outcome = replay_lists(source, 4, machine(cpu_ns=1), miss=miss, warm=((0, 0), (0, 1)))
    assert outcome.counts(executed, "steps", "complete_steps") == (1, 3, 2)


def test_one_by_one_an_expert_counts_as_its_turn_finds_it() -> None:
    # two experts fit. When 2 is fetched in its turn, it evicts 1, which was there at the gate
    source = ListSource(sizes(1, 4, 3), [Prompted(tokens([[0, 1, -1]], [[2, 0, 1]]))])
    outcome = replay_lists(source, 2, machine(), contract="sequential")
    assert outcome.counts("misses", "steps", "complete_steps") == (5, 2, 0)


def test_a_pass_of_several_requests_counts_for_its_first() -> None:
    trace = trace_of("prefill")
    result = replay(trace, configure(capacity="60%", passes="batch:2"))
    assert sum(row["steps"] for row in result.per_request) == result.totals["steps"]
    assert sum(row["complete_steps"] for row in result.per_request) == result.totals["complete_steps"]


# ---------------------------------------------------------------- the most of any eviction


def most(steps: list[State], pool: int, each: Sequence[int], start: State) -> int:
    """Search all sequences of contents, as `most_hits` does under the relaxed rules."""
    best = {start: 0}
    for demanded in steps:
        after: dict[State, int] = {}
        for held, complete in best.items():
            for state in subsets(sorted(held | demanded), pool, each):
                after[state] = max(after.get(state, 0), complete + int(bool(demanded) and demanded <= held))
        best = after
    return max(best.values())


@pytest.mark.slow
@every("unequal", [False, True])
def test_the_most_complete_steps_of_all_contents_lie_between_the_way_and_the_limit(unequal: bool) -> None:
    dice, met = random.Random(5), np.zeros(2, np.int64)
    for _ in range(40):
        layers, experts = dice.choice(((1, 4), (2, 3)))
        k = dice.randint(1, 2)
        cells = [[dice.sample(range(experts), k) for _ in range(layers)] for _ in range(dice.randint(3, 8))]
        each = [dice.randint(1, 3) for _ in range(layers)] if unequal else [1] * layers
        trace, pool = trace_of_rows(cells, experts, each), dice.randint(max(each), sum(each) * experts)
        warm = ((0, 0),) if dice.random() < 0.3 else ()
        sizes_of = (pool, tuple(each)) if len(set(each)) > 1 else (0, ())
        bound = Bound(RELAXED, "token", "never", "global", "atomic", (pool // min(each),), warm, *sizes_of)
        (steps,) = steps_of(trace, bound)
        known, found = most(steps, pool, each, frozenset(warm)), complete_steps(trace, bound)
        assert found.at_least <= known <= found.at_most
        met += np.array([found.at_least == known, known == found.at_most])
    assert met.min() > 30, met


@pytest.mark.slow
@every("policy", ["lru", "belady"])
@searched(40)
@given(scenarios(one_size=True), st.sampled_from(("atomic", "sequential")))
def test_no_replay_has_more_complete_steps_than_the_limit(policy: str, scenario: Scenario, contract: str) -> None:
    how: dict[str, Any] = {**scenario.how, "contract": contract}
    made, trace = curve(scenario.trace, policy, **how), scenario.trace
    for at in np.flatnonzero(made.decided)[::-6].tolist():
        bound = bound_of(trace, made.config.model_copy(update={"capacity": f"{made.capacity_bytes[at]}B"}))
        assert bound is not None
        found = complete_steps(trace, replace(bound, admission=RELAXED))
        assert made.complete[at] <= found.at_most <= found.steps == made.steps
        if at == len(made.decided) - 1:  # with room for all only first uses leave a step incomplete
            assert found.at_most == made.complete[at]
