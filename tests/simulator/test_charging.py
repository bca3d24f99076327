"""Times that are charged for the decisions of another platform's replay equal those of a replay, to the last ns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.compiled import engine
from moereplay.simulator.compiled import inputs as inputs_module
from moereplay.simulator.compiled.fast_path import key_of
from moereplay.simulator.compiled.inputs import inputs_from
from moereplay.simulator.errors import LATEST_NS, ConfigError
from moereplay.simulator.interface import Sharing, oracle_of
from tests.kit.cases import Cell, ListSource, Prompted, machine, naming, outcome_of, sizes, spec_of, tokens
from tests.kit.parity import PLAIN_EVICTION, PLAIN_PREFETCH, PLAIN_ROUTING, anything
from tests.kit.scenarios import Scenario
from tests.kit.search import searched

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
FOLLOWED: list[int] = []  #: of the runs with prefetch: whether the second platform was charged


@searched(150)
@given(anything(contract="atomic", miss="fetch", warm=()), TIMES, st.data())
def test_charged_times_are_those_of_a_replay(scenario: Scenario, times: dict, data: st.DataObject) -> None:
    """One platform is replayed and another charged, unless a demand exceeds its pool.

    With prefetch it is charged if all transfers start and land in the same order among everything else, as they do on
    the same platform again; the search has both.
    """
    scenario.settings["prefetch"] = data.draw(st.sampled_from(("none", *PLAIN_PREFETCH)))
    scenario.settings["eviction"] = data.draw(st.sampled_from(PLAIN_EVICTION))
    if not scenario.settings["eviction"].startswith("belady"):
        scenario.settings["routing"] = data.draw(st.sampled_from(PLAIN_ROUTING))
    sharing, source = Sharing(), scenario.source
    others = {"more": (), "tiers": (), "prices": {}, "left": 1.0}
    for where in (scenario.times | others, times, times):
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
    if scenario.settings["prefetch"] != "none":
        assert sharing.taken >= 1
        FOLLOWED.append(sharing.taken == 2)
    elif "routing" not in scenario.settings or scenario.settings["routing"] == "standard":
        assert sharing.taken == (2 if fits and len(source._plan) > 0 else 0)


def test_a_run_that_ends_too_late_is_refused_on_another_platform_too() -> None:
    """Every step takes dense_ns, the first two 1 ns more for a transfer; no step may begin after the limit."""
    steps, slowest = 4_700, 10**15  # ns of a dense part, the most that a platform may say
    source = ListSource(sizes(1, 2, 1), [Prompted(tokens([[0]], *[[[1]]] * (steps - 1)))])
    sharing = Sharing()

    def end(dense_ns: int) -> int:
        spec = spec_of(source.geometry, 2, machine(dense_ns=dense_ns), log=False)
        inputs, oracle = inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction)
        return engine._shared(inputs, oracle, spec, sharing, key_of(spec)).end_ns

    assert (steps - 2) * slowest > LATEST_NS
    assert [end(dense_ns) for dense_ns in (1, 15)] == [steps + 2, 15 * steps + 2]
    with pytest.raises(ConfigError, match="more than 146 years"):
        end(slowest)
    assert (end(2), sharing.taken) == (2 * steps + 2, 2)


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


def test_the_search_follows_courses_and_leaves_them() -> None:
    """Or the test above would not find a fault in one of the two."""
    assert len(FOLLOWED) / 8 < sum(FOLLOWED) < len(FOLLOWED) * 7 / 8


def test_a_platform_follows_a_course_until_a_transfer_would_land_on_the_other_side_of_a_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dense part takes 10 ns, an expert 1 ns; its transfer 1 ns and the latency L; layer 1 is prefetched at gate 0.

    Gate 0 opens at 10; expert 0 lands at 11 + L and runs until 12 + L. The prefetch begins when it has landed, and
    lands at 12 + 2 L. Gate 1 opens at 22 + L: up to L = 10 it finds the prefetch, later compute waits for it. With
    depth 2 it begins at gate 0 as well and lands behind it, at 12 + L.
    """
    cells = [Cell([0], look=[naming(2, [1])]), Cell([1], look=[naming(2, [0])])]
    source = ListSource(sizes(2, 2, 1), [Prompted([cells])])
    platforms = [(3, 1, 26, 0), (10, 1, 33, 1), (11, 1, 35, 1), (40, 1, 93, 2), (40, 2, 63, 2), (50, 2, 73, 3)]

    def ends(of: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
        sharing, found = Sharing(), []
        for latency_ns, depth, *_ in of:
            where = machine(dense_ns=10, expert_ns=1, latency_ns=latency_ns, depth=depth)
            spec = spec_of(source.geometry, 2, where, log=False, prefetch="top_k")
            inputs, oracle = inputs_from(source), oracle_of(source, spec.config, spec.chosen.eviction)
            found.append((engine._shared(inputs, oracle, spec, sharing, key_of(spec)).end_ns, sharing.taken))
        return found

    assert ends(platforms) == [(end, taken) for *_, end, taken in platforms]
    for room in (0, 5):  # none, or not for all marks
        monkeypatch.setattr(inputs_module, "course_length", lambda numbers, room=room: room)
        assert ends(platforms) == [(end, 0) for *_, end, _ in platforms]
