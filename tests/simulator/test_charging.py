"""Times that are charged for the decisions of another platform's replay equal those of a replay, to the last ns."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereplay.simulator.compiled import engine
from moereplay.simulator.compiled.charging import key_of
from moereplay.simulator.compiled.inputs import inputs_from
from moereplay.simulator.interface import Sharing, oracle_of
from tests.kit.cases import machine, outcome_of, spec_of
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


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=slow)
@given(anything(contract="atomic", miss="fetch", prefetch="none", warm=()), TIMES, st.data())
def test_charged_times_are_those_of_a_replay(scenario: Scenario, times: dict, data: st.DataObject) -> None:
    """One platform is replayed, and another charged unless a step's demand exceeds its pool."""
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
        assert sharing.taken == (fits and len(source._plan) > 0)
