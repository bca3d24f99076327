"""Curves: equal to a replay at every capacity, layer by layer; where only a machine's times decide, they say so."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.policies.contract import PolicyError
from moereplay.results.result import Result
from moereplay.results.schema import row_digest
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import Curve, curve, to_row, write_curve
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Platform
from moereplay.simulator.replay import plan, replay, replay_source
from moereplay.simulator.source import TraceSource
from moereplay.sweeps.grid import decide
from moereplay.traces.demand import demand_of
from moereplay.traces.schema import Header, Request, Trace, memory_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.cases import machine, sizes
from tests.kit.every import every
from tests.kit.recordings import needs_recording
from tests.kit.search import searched
from tests.simulator.test_real_streams import ACCESSES, HITS, phone, stream

PATIENT, QUICK = machine(bytes_per_ns=0.01, expert_ns=1), machine(bytes_per_ns=float("inf"), expert_ns=5)


def trace_of(rows: Sequence[Sequence[Sequence[int]]], experts: int, expert_bytes: Sequence[int] | int = 1) -> Trace:
    """One request without a prompt; rows[t][layer] are the chosen experts in rank order, -1 none."""
    chosen = np.array(rows, np.int16)
    geometry = sizes(chosen.shape[1], experts, chosen.shape[2], expert_bytes)
    return memory_trace(Header(geometry=geometry), [Request(chosen, 0)])


def replayed(trace: Trace, made: Curve, capacity: int, where: Platform) -> Result:
    """The replay of a curve's settings at a capacity in bytes."""
    ready = replace(plan(trace, made.config.model_copy(update={"capacity": f"{capacity}B"})), machine=where)
    return replay_source(TraceSource(trace, made.config.schedule, ready.chosen.prefetch, frozenset()), ready)


def by_layer(result: Result, name: str, layers: int) -> list[int]:
    return [sum(row[name] for row in result.per_layer if row["layer"] == layer) for layer in range(layers)]


def assert_equals_replays(trace: Trace, made: Curve, where: Platform) -> None:
    """At every capacity that the curve decides: misses, complete steps and the rest of every layer."""
    layers = trace.geometry.layers
    for at in np.flatnonzero(made.decided):
        result = replayed(trace, made, int(made.capacity_bytes[at]), where)
        assert by_layer(result, "misses", layers) == made.layer_misses[:, at].tolist()
        assert by_layer(result, "complete_steps", layers) == made.layer_complete[:, at].tolist()
        assert by_layer(result, "steps", layers) == made.layer_steps.tolist()
        assert by_layer(result, "compulsory", layers) == made.layer_compulsory.tolist()
        assert by_layer(result, "accesses", layers) == made.layer_accesses.tolist()


# ---------------------------------------------------------------- small scenarios


class Scenario(NamedTuple):
    """A trace, how to replay it, and a machine on which events collide."""

    trace: Trace
    how: dict[str, str]
    where: Platform

    @property
    def every_byte(self) -> range:
        """From the largest expert to all of them."""
        geometry = self.trace.geometry
        return range(max(geometry.expert_bytes), geometry.total_bytes + 1)

    def curve(self, policy: str) -> Curve:
        how: dict[str, Any] = dict(self.how)
        return curve(self.trace, policy, **how, capacities=self.every_byte)


@st.composite
def scenarios(draw: st.DrawFn, one_size: bool = False, **fixed: str) -> Scenario:
    """Any schedule, reset and scope; prompts of up to four tokens, so that steps may not fit."""
    how = {"scope": draw(st.sampled_from(("global", "per_layer"))), "contract": "atomic"}
    how |= {"passes": draw(st.sampled_from(("recorded", "token", "chunk:2", "batch:2")))}
    how |= {"reset": draw(st.sampled_from(("never", "request", "3")))} | fixed
    dice = random.Random(draw(st.integers(0, 2**32)))
    return Scenario(_trace(dice, one_size and how["scope"] == "global"), how, _machine(dice))


def _machine(dice: random.Random) -> Platform:
    spent: dict[str, Any] = {
        name: dice.randrange(8) for name in ("dense_ns", "expert_ns", "expert_ns_per_token", "pass_ns")
    }
    rate = dice.choice((0.5, 1.0, 3.0, float("inf")))
    return machine(bytes_per_ns=rate, latency_ns=dice.randrange(8), depth=dice.randint(1, 3), **spent)


def _trace(dice: random.Random, one_size: bool) -> Trace:
    layers, experts = dice.randint(1, 3), dice.randint(2, 6)
    k = dice.randint(1, min(3, experts))
    each = [dice.randint(1, 5) for _ in range(layers)]
    header = Header(geometry=sizes(layers, experts, k, [each[0]] * layers if one_size else each))
    weighted = dice.random() < 0.5
    return memory_trace(header, [_request(dice, layers, experts, k, weighted) for _ in range(dice.randint(1, 3))])


def _request(dice: random.Random, layers: int, experts: int, k: int, weighted: bool) -> Request:
    """One cell in eight is not routed; weights are coarse, so that they tie."""
    prompt, tokens = dice.randint(0, 4), dice.randint(4, 10)
    cells = [dice.sample(range(experts), k) if dice.random() > 0.125 else [-1] * k for _ in range(tokens * layers)]
    weights = [sorted((dice.randrange(1, 5) / 8 for _ in range(k)), reverse=True) for _ in cells]
    shape = (tokens, layers, k)
    drawn = np.array(weights, np.float32).reshape(shape) if weighted else None
    return Request(np.array(cells, np.int16).reshape(shape), prompt, drawn)


@searched(50)
@given(scenarios())
def test_lru_equals_the_replays_at_every_byte_of_capacity(scenario: Scenario) -> None:
    assert_equals_replays(scenario.trace, scenario.curve("lru"), scenario.where)


@searched(50)
@given(scenarios(one_size=True))
def test_belady_equals_the_replays_at_every_number_of_experts(scenario: Scenario) -> None:
    assert_equals_replays(scenario.trace, scenario.curve("belady"), scenario.where)


@every("policy", ["lru", "belady"])
@searched(50)
@given(scenarios(one_size=True, contract="sequential"))
def test_looked_up_one_by_one_every_capacity_is_decided(policy: str, scenario: Scenario) -> None:
    made = scenario.curve(policy)
    assert made.decided.all()
    assert_equals_replays(scenario.trace, made, scenario.where)


@every("policy", ["lru", "belady"])
@searched(50)
@given(scenarios(one_size=True))
def test_what_holds_the_largest_step_is_always_decided(policy: str, scenario: Scenario) -> None:
    made, geometry = scenario.curve(policy), scenario.trace.geometry
    demanded = np.diff(demand_of(scenario.trace, scenario.how["passes"]).offsets).reshape(-1, geometry.layers).max(0)
    needed = int(np.max(demanded * geometry.expert_bytes))
    if scenario.how["scope"] == "per_layer":
        needed = int(demanded.max()) * sum(geometry.expert_bytes)
    assert made.decided[made.capacity_bytes >= needed].all()


@every("policy", ["lru", "belady"])
@searched(50)
@given(scenarios(one_size=True))
def test_more_room_never_costs_a_hit_and_belady_never_misses_more(policy: str, scenario: Scenario) -> None:
    made, lru = scenario.curve(policy), scenario.curve("lru")
    assert (np.diff(made.misses[made.decided]) <= 0).all()
    both = made.decided & lru.decided
    assert (made.misses[both] <= lru.misses[both]).all()


# ---------------------------------------------------------------- an obvious model


def obvious_misses(trace: Trace, policy: str, capacity: int) -> int:
    """A list of what is resident, in order of last use; a step's experts enter, then the worst others are evicted."""
    demand, geometry = demand_of(trace, "recorded"), trace.geometry
    steps = [[(step % geometry.layers, e) for e in demand.step(step).expert] for step in range(len(demand.offsets) - 1)]
    later: dict[tuple[int, int], list[int]] = {}
    for now, step in enumerate(steps):
        for at, x in enumerate(step):
            later.setdefault(x, []).append(now * geometry.experts + at)

    def next_use(x: tuple[int, int], now: int) -> tuple[float, tuple[int, int]]:
        return next((at for at in later[x] if at >= (now + 1) * geometry.experts), np.inf), x

    cache: list[tuple[int, int]] = []
    misses = 0
    for now, step in enumerate(steps):
        misses += sum(x not in cache for x in step)
        others = [x for x in cache if x not in step]
        if policy == "relaxed_belady":  # the best of both stay; experts are of one size
            best = sorted({*cache, *step}, key=lambda x: next_use(x, now))
            cache = best[: capacity // geometry.expert_bytes[0]]
            continue
        while sum(geometry.expert_bytes[layer] for layer, _ in [*others, *step]) > capacity:
            others.remove(others[0] if policy == "lru" else max(others, key=lambda x: next_use(x, now)))
        cache = [*others, *step]
    return misses


@pytest.mark.slow
@every(
    "policy, each", [("lru", (5,) * 6), ("lru", (3, 5, 5, 8, 2, 5)), ("belady", (5,) * 6), ("relaxed_belady", (5,) * 6)]
)
def test_curves_equal_an_obvious_model(policy: str, each: tuple[int, ...]) -> None:
    # 96 experts and 1,000 uses, so that the time line of last uses is pushed together several times
    geometry = sizes(6, 16, 3, each)
    drawn = Synthetic(kind="markov", geometry=geometry, prompt_tokens=5, decode_tokens=50, reuse=0.5, logits=False)
    trace = synthesise(drawn)
    made = curve(trace, policy)
    largest = int(np.diff(demand_of(trace, "recorded").offsets).max())
    chosen = [capacity for capacity in made.capacity_bytes.tolist() if capacity >= largest * max(each)][::7]
    assert [made.misses_at(capacity) for capacity in chosen] == [obvious_misses(trace, policy, c) for c in chosen]
    assert len({made.misses_at(capacity) for capacity in chosen}) > 8


# ---------------------------------------------------------------- closed forms


def test_a_cycle_never_hits_in_an_lru_that_is_too_small() -> None:
    # five experts in turn, four times. Once C are there, Belady keeps all but the last: 5 - C of any 4 uses miss, the
    # first of them at once: C + (20 - C) (5 - C) / 4, rounded up
    trace = trace_of([[[t % 5]] for t in range(20)], experts=6)
    assert curve(trace, "lru").misses.tolist() == [20, 20, 20, 20, 5, 5]
    assert curve(trace, "belady").misses.tolist() == [20, 16, 12, 8, 5, 5]


def test_a_repeating_token_hits_once_all_its_layers_fit() -> None:
    # 4 layers of 2: nothing hits with up to (L - 1) * k = 6, everything after the first token with 8
    trace = trace_of([[[0, 1]] * 4] * 10, experts=3)
    misses = curve(trace).misses.tolist()
    assert (misses[:6], misses[7:]) == ([80] * 6, [8] * 5)


@every("policy", ["lru", "belady"])
@searched(50)
@given(scenarios(one_size=True, reset="never"))
def test_with_room_for_all_only_first_uses_miss(policy: str, scenario: Scenario) -> None:
    made, demand = scenario.curve(policy), demand_of(scenario.trace, scenario.how["passes"])
    layer = np.repeat(np.arange(len(demand.offsets) - 1) % scenario.trace.geometry.layers, np.diff(demand.offsets))
    distinct = len({*zip(layer.tolist(), demand.expert.tolist(), strict=True)})
    assert made.misses[-1] == made.compulsory == distinct
    assert made.accesses == len(demand.expert)


# ---------------------------------------------------------------- where a curve ends


def differing(trace: Trace, policy: str, capacity: int) -> set[int]:
    """Misses on a slow and on a fast link."""
    made = curve(trace, policy)
    return {replayed(trace, made, capacity, where).totals["misses"] for where in (PATIENT, QUICK)}


def test_lru_is_undecided_where_a_hit_follows_a_miss_in_a_step_that_does_not_fit() -> None:
    # three experts fit. Of the step 3 0 1 2 4 5 a slow link finds 3 computed, and older than 2, when it fetches 5;
    # a fast one finds 2 computed, and 3 not yet. The next token uses 2
    trace = trace_of([[[0, 1, 2, -1, -1, -1]], [[3, 0, 1, 2, 4, 5]], [[2, -1, -1, -1, -1, -1]]], experts=6)
    assert differing(trace, "lru", 3) == {6, 7}
    assert curve(trace).decided.tolist() == [False, False, False, False, False, True]


def test_belady_is_undecided_where_what_is_left_of_a_step_that_does_not_fit_matters() -> None:
    # three experts fit. When the link is free for 3, a slow one finds 0 and 1 computed, and 1 used later than 0; a fast
    # one finds 0 alone. The next token uses 0
    trace = trace_of([[[0, 1, 2, 3]], [[0, -1, -1, -1]]], experts=4)
    assert differing(trace, "belady", 3) == {4, 5}
    assert curve(trace, "belady").decided.tolist() == [False, False, False, True]


def test_a_reset_clears_what_a_step_that_does_not_fit_leaves_behind() -> None:
    header = Header(geometry=sizes(1, 4, 2))
    wide, narrow = np.array([[[0, 1]], [[2, 3]]], np.int16), np.array([[[0, 1]]], np.int16)
    trace = memory_trace(header, [Request(wide, 2), Request(narrow, 0)])
    assert not curve(trace, "belady").decided.all()
    assert curve(trace, "belady", reset="request").decided.all()


def test_the_rest_of_a_curve_is_replayed_on_a_machine() -> None:
    trace = trace_of([[[0, 1, 2, -1, -1, -1]], [[3, 0, 1, 2, 4, 5]], [[2, -1, -1, -1, -1, -1]]], experts=6)
    whole, counted = decide(trace, curve(trace), "a100-5gbps"), []
    for capacity in range(1, 7):
        counted.append(replay(trace, configure(capacity=f"{capacity}B", platform="a100-5gbps")).totals["misses"])
    assert (whole.misses.tolist(), whole.platform) == (counted, "a100-5gbps")


def test_with_unequal_bytes_more_room_can_cost_belady_hits_so_it_has_no_curve() -> None:
    # experts of 3 bytes in layer 0, of 1 in layer 1; found by search: 5 bytes hit more often than 6
    rows = [[[0], [1]], [[2], [2]], [[1], [0]], [[1], [0]], [[0], [2]], [[2], [0]]]
    trace = trace_of(rows, experts=3, expert_bytes=[3, 1])
    hits = [replay(trace, configure(eviction="belady", capacity=f"{c}B")).totals["hits"] for c in (5, 6)]
    assert hits == [4, 3]
    with pytest.raises(ConfigError, match=r"^no curve of belady in a pool of unequal bytes: .* scope per_layer has it"):
        curve(trace, "belady")
    assert curve(trace, "belady", scope="per_layer").decided.all()


def test_other_policies_are_refused_by_name() -> None:
    trace = trace_of([[[0]]], experts=2)
    with pytest.raises(ConfigError, match=r"^invalid --eviction 'fifo': .*stack algorithm"):
        curve(trace, "fifo")
    with pytest.raises(PolicyError):
        curve(trace, "lur")
    with pytest.raises(ConfigError, match=r"reset.*'daily'"):
        curve(trace, reset="daily")


def test_a_curve_answers_only_for_what_it_counted() -> None:
    trace = trace_of([[[0], [0]], [[1], [0]]], experts=2, expert_bytes=[3, 2])
    whole = curve(trace, capacities=[4])
    assert whole.capacity_bytes.tolist() == [4, 5, 7, 10]  # from the largest expert on; mean experts have 2.5 bytes
    assert whole.misses_at(4) == replay(trace, configure(capacity="4B")).totals["misses"]
    with pytest.raises(ConfigError, match="no capacity of 6 bytes"):
        whole.misses_at(6)
    one_size = trace_of([[[0, 1]], [[0, 1]]], experts=2, expert_bytes=10)
    assert curve(one_size).misses_at(25) == 2
    with pytest.raises(ConfigError, match="no capacity of 9 bytes"):
        curve(one_size).misses_at(9)
    with pytest.raises(ConfigError, match=r"^10 bytes hold less than a step demands, .* replay that capacity"):
        curve(one_size, "belady").misses_at(10)


# ---------------------------------------------------------------- real streams


@pytest.mark.slow
@needs_recording("gpt-oss-20b", "qwen3-30b-a3b", claim="curves")
@pytest.mark.parametrize("policy", ["lru", "belady"])
@pytest.mark.parametrize("model", HITS)
def test_curves_of_real_streams_hit_as_often_as_two_scripts_agree(model: str, policy: str) -> None:
    trace = stream(model)
    made = curve(trace, policy, scope="per_layer", passes="token", reset="request")
    hits = [made.accesses - made.misses_at(slots * sum(trace.geometry.expert_bytes)) for slots in HITS[model]]
    assert hits == [row[("lru", "belady").index(policy)] for row in HITS[model].values()]
    assert made.accesses == ACCESSES[model]


@pytest.mark.long
@needs_recording("gpt-oss-20b", "qwen3-30b-a3b", claim="curves")
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_a_slice_of_a_real_stream_equals_the_replays_at_every_capacity(policy: str) -> None:
    whole = stream("gpt-oss-20b")
    request = whole.request(0)
    trace = memory_trace(whole.header, [Request(request.chosen[:5], 2)])
    made = curve(trace, policy)
    assert made.decided.sum() > 700
    assert_equals_replays(trace, made, PATIENT)


@needs_recording("gemma-4-26b-a4b", claim="curves")
def test_a_phones_trace_of_unequal_experts_equals_the_replays() -> None:
    trace, budget = phone(), 4000 * 2**20
    made = curve(trace, capacities=[budget])
    assert made.decided.all()  # with a prompt of 29 tokens: what it leaves behind is pushed out before it is used
    for capacity in [budget, *made.capacity_bytes[[20, 1500]].tolist()]:
        assert made.misses_at(capacity) == replay(trace, configure(capacity=f"{capacity}B")).totals["misses"]


# ---------------------------------------------------------------- files and interpreters

SMALL = """
from moereplay.simulator.curves.curve import curve
from tests.simulator.test_curves import small
print([curve(small(), policy).layer_misses.tolist() for policy in ("lru", "belady")])
"""


def small() -> Trace:
    drawn: dict[str, Any] = {"kind": "markov", "prompt_tokens": 4, "decode_tokens": 12, "reuse": 0.5, "logits": False}
    return synthesise(Synthetic(geometry=sizes(3, 6, 2), **drawn))


@pytest.mark.slow
def test_plain_python_counts_the_same() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ran = subprocess.run([sys.executable, "-c", SMALL], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str([curve(small(), policy).layer_misses.tolist() for policy in ("lru", "belady")])


def test_a_curve_is_written_whole_with_its_digest(tmp_path: Path) -> None:
    made = curve(small(), "belady", reset="request")
    path = write_curve(tmp_path, made)
    (row,) = pl.read_parquet(path).to_dicts()
    assert row.pop("digest") == row_digest(row)
    assert row == to_row(made)
    assert row["misses"] == [None if count < 0 else count for count in made.misses.tolist()]
    assert None in row["misses"]
    filled = decide(small(), made, "a100-5gbps")
    assert write_curve(tmp_path, filled) == path  # it replaces the one with gaps
