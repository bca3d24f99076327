"""The closed form of a step: its landings and its end are those of both engines."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.simulator.limits.least_time import carried
from moereplay.simulator.step_time import compute_ends, landings, landings_at_once
from moereplay.simulator.times import Times
from tests.kit.cases import ListSource, Prompted, machine, replay_lists, sizes, tokens

GATE = 3  # ns: when the dense part has ended
NUMBERS = {"latency": st.integers(0, 30), "wire": st.integers(1, 20), "depth": st.integers(1, 4)}


@settings(max_examples=60, deadline=None)
@given(missed=st.integers(1, 7), load=st.integers(0, 20), start=st.integers(0, 9), expert=st.integers(0, 20), **NUMBERS)
def test_a_step_is_that_of_a_replay(
    missed: int, load: int, start: int, expert: int, latency: int, wire: int, depth: int
) -> None:
    source = ListSource(sizes(1, missed, missed, wire), [Prompted(tokens([[*range(missed)]]))])
    prices = {"link": {"start_ns": start}, "loading": {"ns_per_expert": load}}
    where = machine(latency_ns=latency, depth=depth, dense_ns=GATE, expert_ns=expert, prices=prices)
    ran = replay_lists(source, missed * wire, where)
    lands = landings([(i + 1) * load for i in range(missed)], depth, latency, wire, start)
    assert [end - GATE for _, end, *_ in ran.spans("transfer")] == lands
    ends = compute_ends(np.array([missed * load]), np.array([missed]), lambda i, n: lands[i], lambda i, n: expert)
    assert ran["time_ns"] - GATE == ends[0]


@settings(max_examples=60, deadline=None)
@given(many=st.integers(1, 30), **NUMBERS)
def test_of_transfers_that_are_issued_at_once_the_recurrence_is_solved(
    many: int, latency: int, wire: int, depth: int
) -> None:
    lands = landings([0] * many, depth, latency, wire)
    assert landings_at_once(many, depth, latency, wire).tolist() == lands
    assert landings_at_once(many, depth, latency, np.array([wire, 0]))[:, 0].tolist() == lands
    geometry = sizes(1, 2, 1, wire)
    times = Times(machine(latency_ns=latency, depth=depth), geometry, (geometry.expert_bytes,))
    assert carried(times, many).tolist() == [0, *lands]


def test_steps_run_each_their_own_misses() -> None:
    """The first step runs its hits until 10, its misses until 15 and 25; the second has one, the third none."""
    ends = compute_ends(
        np.array([10, 2, 7]), np.array([2, 1, 0]), lambda i, n: np.array([12, 20])[i], lambda i, n: [3, 5][i]
    )
    assert ends.tolist() == [25, 15, 7]
