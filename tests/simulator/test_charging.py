"""Times that are charged for the decisions of another platform's replay equal those of a replay, to the last ns."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereplay.simulator.compiled import charging, engine
from moereplay.simulator.compiled.charging import key_of
from moereplay.simulator.compiled.inputs import inputs_from
from moereplay.simulator.interface import Sharing, oracle_of
from tests.kit.cases import ListSource, Prompted, machine, outcome_of, sizes, spec_of, tokens
from tests.kit.parity import PLAIN_EVICTION, PLAIN_ROUTING, anything
from tests.kit.scenarios import Scenario

FEW = st.integers(0, 7)
TIMES = st.fixed_dictionaries(
    {
        "bytes_per_ns": st.sampled_from((0.5, 1.0, 2.0, 5.0)),
        "latency_ns": FEW,
        "depth": st.integers(1, 4),
        "dense_ns": FEW,
        "expert_ns": FEW,
        "expert_ns_per_token": FEW,
    }
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=slow)
@given(anything(contract="atomic", miss="fetch", warm=()), TIMES, st.data())
def test_charged_times_are_those_of_a_replay(scenario: Scenario, times: dict, data: st.DataObject) -> None:
    """One platform is replayed and another charged, unless a demand exceeds its pool or something prefetches."""
    scenario.settings["prefetch"] = data.draw(st.sampled_from(("none", "none", "none", "top_k")))
    scenario.settings["eviction"] = data.draw(st.sampled_from(PLAIN_EVICTION))
    if not scenario.settings["eviction"].startswith("belady"):
        scenario.settings["routing"] = data.draw(st.sampled_from(PLAIN_ROUTING))
    sharing, source = Sharing(), scenario.source
    others = {"more": (), "tiers": (), "prices": {}, "left": 1.0}
    for where in (scenario.times | others, times):
        spec = spec_of(source.geometry, scenario.pools, machine(**where), log=False, **scenario.settings)
        inputs, oracle = inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction)
        shared = engine._shared(inputs, oracle, spec, sharing, key_of(spec))
        alone = engine.run_inputs(inputs, oracle, spec).ran
        assert outcome_of(shared) == outcome_of(alone)
    fits = all(
        len(source._union(rows, layer).expert) * size <= spec.pools[layer if len(spec.pools) > 1 else 0]
        for rows in source._plan
        for layer, size in enumerate(source.geometry.expert_bytes)
    )
    if "routing" not in scenario.settings or scenario.settings["routing"] == "standard":
        assert sharing.taken == (fits and len(source._plan) > 0 and scenario.settings["prefetch"] == "none")


def test_a_run_that_may_end_too_late_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay then says so, or not: sums of the times of all steps are not trusted near the limit."""
    monkeypatch.setattr(charging, "LATEST_NS", 100)
    source, sharing = ListSource(sizes(1, 2, 1), [Prompted(tokens([[0]], [[1]], [[0]]))]), Sharing()
    for dense_ns, taken in ((1, 0), (15, 1), (17, 1)):  # 3 steps take 3 dense_ns and 2 ns of transfers
        spec = spec_of(source.geometry, 2, machine(dense_ns=dense_ns), log=False)
        inputs, oracle = inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction)
        assert engine._shared(inputs, oracle, spec, sharing, key_of(spec)).end_ns == 3 * dense_ns + 2
        assert sharing.taken == taken


def test_tokens_of_hits_and_misses_in_a_pass_of_several() -> None:
    """Pass 0 misses experts 0 (2 tokens) and 1; pass 1 runs 0 again over 2 tokens while 2 is read, for 1 token."""
    rows = tokens([[0]], [[0]], [[1]], [[2]], [[0]], [[0]])
    source, sharing = ListSource(sizes(1, 3, 1), [Prompted(rows, prompt=6)], "chunk:3"), Sharing()
    for per_token in (1, 50):
        spec = spec_of(source.geometry, 3, machine(latency_ns=9, expert_ns_per_token=per_token), log=False)
        inputs, oracle = inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction)
        ended = engine._shared(inputs, oracle, spec, sharing, key_of(spec)).end_ns
    # expert 0 lands at 10 and runs until 110, 1 until 160; from there 0 runs until 260, 2 has landed and runs until 310
    assert (ended, sharing.taken) == (310, 1)
