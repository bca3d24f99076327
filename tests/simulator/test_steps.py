"""Decisions in steps: the compiled engine asked step by step decides what a whole replay decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given

from moereplay.policies.errors import PolicyError
from moereplay.policies.grammar import parse
from moereplay.simulator.compiled.engine import Stepper, can_step
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import RunSpec
from moereplay.simulator.reference.machine import Machine, simulated
from moereplay.simulator.reference.state import Area, NullPlacement
from moereplay.simulator.steps import run
from tests.kit.cases import ListSource as Lists
from tests.kit.cases import Outcome, Prompted, compiled_run, machine, outcome_of, sizes, spec_of, tokens
from tests.kit.parity import anything
from tests.kit.scenarios import Scenario
from tests.kit.search import searched

LATER = ("link_busy_ns",)  # charged when a transfer ends, and no longer when it begins


def spec_for(scenario: Scenario, **times: Any) -> RunSpec:
    """One link, and no price that is more than a number in a table."""
    plain = {name: value for name, value in scenario.times.items() if name not in ("more", "tiers", "share", "prices")}
    miss = parse("miss", scenario.settings["miss"])
    assume(not miss.policy.uses_cpu(miss.params))
    spec = spec_of(scenario.source.geometry, scenario.pools, machine(**plain | times), True, **scenario.settings)
    assume(can_step(spec))
    return spec


def on(spec: RunSpec) -> Machine:
    return simulated(spec.times, spec.layout.precisions)


def without(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in LATER} for row in rows]


def same(ours: Outcome, theirs: Outcome) -> bool:
    rows = ((ours.layers, theirs.layers), (ours.requests, theirs.requests))
    return ours.totals == theirs.totals and all(without(mine) == without(other) for mine, other in rows)


@searched(70)
@given(anything())
def test_in_steps_the_engine_does_what_it_does_whole(scenario: Scenario) -> None:
    spec = spec_for(scenario)
    whole = outcome_of(compiled_run(scenario.source, spec))
    steps = outcome_of(run(Stepper.of_source(scenario.source, spec), on(spec), NullPlacement(), spec.warm))
    assert steps.events == whole.events and same(steps, whole)


def demand(*rows: Any) -> Lists:
    return Lists(sizes(2, 4, k=2), [Prompted(tokens(*rows))])


ROWS = [([0, 1], [2, 3]), ([2, 3], [0, 1]), ([0, 2], [1, 3]), ([1, 3], [0, 2]), ([0, 1], [2, 3])]


class Seats:
    """A placement that says how many copies lie there, and refuses to place one twice."""

    def __init__(self) -> None:
        self.there: dict[int, Area] = {}
        self.most = 0

    def warmed(self, y: int) -> None:
        self.placed(y, Area.POOL)

    def placed(self, y: int, area: Area) -> None:
        assert y not in self.there
        self.there[y] = area
        self.most = max(self.most, len(self.there))

    def promoted(self, y: int) -> None:
        self.there[y] = Area.POOL

    def vacated(self, y: int) -> None:
        del self.there[y]


@searched(60)
@given(anything())
def test_copies_are_placed_where_the_reference_places_them(scenario: Scenario) -> None:
    from moereplay.simulator.reference.engine import run as reference

    spec = spec_for(scenario)
    ours, theirs = Seats(), Seats()
    run(Stepper.of_source(scenario.source, spec), on(spec), ours, spec.warm)
    reference(scenario.source, spec, on(spec), theirs)
    assert ours.there.keys() == theirs.there.keys() and ours.most == theirs.most


def test_what_steps_do_not_know_is_refused_by_their_check() -> None:
    geometry = sizes(2, 4)
    assert can_step(spec_of(geometry, 4, machine()))
    assert not can_step(spec_of(geometry, 4, machine(prices={"overlap": "none"})))
    assert not can_step(spec_of(geometry, 4, machine(prices={"link": {"first_piece": 0.5}})))
    assert not can_step(replace(spec_of(geometry, 4, machine()), arrivals=(0, 5)))


def test_what_ends_a_run_is_raised() -> None:
    source = demand(*ROWS)
    spec = spec_of(source.geometry, 5, machine(cpu_ns=1), miss="cpu")
    with pytest.raises((ConfigError, PolicyError)):
        run(Stepper.of_source(source, spec), on(spec), NullPlacement())
