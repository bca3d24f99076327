"""One engine, any clock: the reference engine on machines that it is given, through its public constructor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import simpy
from hypothesis import given

from moereplay.simulator.interface import RunSpec
from moereplay.simulator.reference.engine import Driven, run
from moereplay.simulator.reference.machine import Machine
from moereplay.simulator.reference.state import Area, Transfer
from tests.kit.cases import (
    Cell,
    ListSource,
    Outcome,
    Prompted,
    Token,
    machine,
    naming,
    outcome_of,
    sizes,
    spec_of,
)
from tests.kit.machines import Arena, RealMachine, Scripted, known_at_the_end, simulation, with_links
from tests.kit.scenarios import Scenario, scenarios
from tests.kit.search import searched

SLEEP_S = 0.0005  #: every activity of the real machine
#: Work on the CPU, rejected admissions, side buffers, resets and warm starts are all in here.
ON_THREADS: tuple[dict[str, Any], ...] = (
    {"eviction": "lru"},
    {"eviction": "lru", "prefetch": "top_k", "reset": "request"},
    {"eviction": "lfu", "prefetch": "side_buffer:buffers=2:fetch=2"},
    {"eviction": "pinned:profile=given:share=.6", "profile": ((0, 0), (0, 1)), "prefetch": "top_k"},
    {"eviction": "fifo", "miss": "cpu", "reset": "3"},
    {"eviction": "lru", "contract": "sequential", "warm": ((0, 1), (1, 2))},
)


def spec_for(scenario: Scenario) -> RunSpec:
    return spec_of(scenario.source.geometry, scenario.pools, machine(**scenario.times), **scenario.settings)


def without_first_pieces(scenario: Scenario) -> Scenario:
    """Make compute wait for whole experts: the arrival of a first piece is known before the transfer ends."""
    more = [link.model_copy(update={"first_piece": 1.0}) for link in scenario.times["more"]]
    prices = dict(scenario.times["prices"])
    prices["link"] = {name: figure for name, figure in prices.get("link", {}).items() if name != "first_piece"}
    return scenario._replace(times=scenario.times | {"more": more, "prices": prices})


def without_link_prices(scenario: Scenario) -> Scenario:
    """Remove link costs that depend on earlier transfers."""
    idle = {"start_ns": 0, "start_ns_per_mib": 0}
    more = [link.model_copy(update=idle | {"first_piece": 1.0}) for link in scenario.times["more"]]
    tiers = [tier.model_copy(update=idle) for tier in scenario.times["tiers"]]
    prices = {name: figures for name, figures in scenario.times["prices"].items() if name != "link"}
    return scenario._replace(times=scenario.times | {"more": more, "tiers": tiers, "prices": prices})


def on(scenario: Scenario, of: Machine) -> tuple[Outcome, list[list[list[int]]]]:
    scenario.source.executed.clear()
    return outcome_of(run(scenario.source, spec_for(scenario), of)), list(scenario.source.executed)


@searched(150)
@given(scenarios())
def test_times_that_are_known_at_the_end_change_nothing(scenario: Scenario) -> None:
    """Also of transfers that a reset abandons or that the end of the run cuts off."""
    scenario = without_first_pieces(scenario)
    spec = spec_for(scenario)
    assert on(scenario, known_at_the_end(spec)) == on(scenario, simulation(spec))


@searched(40)
@given(scenarios(miss="fetch"))
def test_a_link_by_script_gives_the_simulated_run(scenario: Scenario) -> None:
    scenario = without_link_prices(scenario)
    more = [link.model_copy(update={"depth": 1}) for link in scenario.times["more"]]
    tiers = [tier.model_copy(update={"depth": 1}) for tier in scenario.times["tiers"]]
    scenario = scenario._replace(times=scenario.times | {"depth": 1, "more": more, "tiers": tiers})
    spec = spec_for(scenario)
    times, precisions = spec.times, spec.layout.precisions

    def scripted(env: simpy.Environment, row: int) -> Scripted:
        def lasts(transfer: Transfer) -> int:
            wire_ns = times.wire_ns[row][transfer.layer][transfer.y % precisions]
            return times.latency_ns[row] + transfer.victims * times.victim_ns + wire_ns

        return Scripted(env, row, lasts)

    assert on(scenario, with_links(simulation(spec), scripted)) == on(scenario, simulation(spec))


def test_a_transfer_that_a_reset_abandons_is_charged_where_it_began() -> None:
    # the prefetch of (1, 1) starts in request 0 at 2 and is in flight when request 1 begins
    cells: list[Token] = [[Cell([0], look=[naming(2, [best])]), Cell([0])] for best in (1, 0)]
    source = ListSource(sizes(2, 2, 1, expert_bytes=10), [Prompted(cells[:1]), Prompted(cells[1:])])
    spec = spec_of(
        source.geometry,
        40,
        machine(dense_ns=1, expert_ns=1),
        prefetch="top_k:factor=2",
        reset="request",
        warm=((0, 0), (1, 0)),
    )
    late = outcome_of(run(source, spec, known_at_the_end(spec)))
    assert late.requests[0]["bytes_prefetch"] == late.requests[0]["link_busy_ns"] == 10
    assert late == outcome_of(run(source, spec))


# ---------------------------------------------------------------- real threads


def a_source() -> ListSource:
    """Two requests of 3 + 4 tokens; 2 layers of 4 experts of one byte, top-2."""
    dice = random.Random(0)

    def cell() -> Cell:
        ids = dice.sample(range(4), 2)
        return Cell(ids, look=[naming(4, dice.sample(range(4), 2))])

    rows: list[Token] = [[cell(), cell()] for _ in range(14)]
    return ListSource(sizes(2, 4, 2), [Prompted(rows[:7], 3), Prompted(rows[7:], 3)])


@contextmanager
def real(slots: int) -> Iterator[tuple[Arena, RealMachine]]:
    arena = Arena(slots)
    threads = RealMachine(arena, SLEEP_S)
    try:
        yield arena, threads
    finally:
        threads.close()


@pytest.mark.parametrize("chosen", ON_THREADS, ids=str)
def test_real_threads_run_under_the_engine(chosen: dict[str, Any]) -> None:
    """Every expert is computed from a slot that holds it; the thread raises otherwise."""
    source, pool = a_source(), 5
    spec = spec_of(source.geometry, pool, machine(), **chosen)
    with real(pool + 3) as (arena, threads):  # two side buffers and the bypass buffer
        ran = outcome_of(run(source, spec, threads.machine, arena))
    areas = list(arena.areas.values())
    assert areas.count(Area.POOL) <= pool and areas.count(Area.SIDE) <= 2 and areas.count(Area.BYPASS) <= 1
    assert len(arena.free) + len(arena.slot) == pool + 3
    moved = ran["bytes_demand"] + ran["bytes_prefetch"]
    assert ran["link_busy_ns"] >= moved * SLEEP_S * 1e9
    assert ran["dense_ns"] >= 10 * 2 * SLEEP_S * 1e9  # 10 passes of 2 layers
    assert ran["time_ns"] >= ran["dense_ns"] + ran["expert_ns"] + ran["stall_ns"]
    assert all(event.t0 <= event.t1 <= ran["time_ns"] or event.kind == "transfer" for event in ran.events)


@pytest.mark.parametrize("chosen", [ON_THREADS[0], ON_THREADS[5]], ids=str)
def test_without_prefetch_real_threads_decide_as_simulated(chosen: dict[str, Any]) -> None:
    source = a_source()
    spec = spec_of(source.geometry, 5, machine(), **chosen)
    with real(8) as (arena, threads):
        found = outcome_of(run(source, spec, threads.machine, arena))
    expected = outcome_of(run(source, spec))
    assert {name: n for name, n in found.totals.items() if not name.endswith("_ns")} == {
        name: n for name, n in expected.totals.items() if not name.endswith("_ns")
    }


def test_a_thread_that_fails_ends_the_run() -> None:
    source = a_source()
    spec = spec_of(source.geometry, 5, machine())
    with real(8) as (arena, threads):
        arena.content = [0]  # the loader finds no slot
        with pytest.raises(IndexError):
            run(source, spec, threads.machine, arena)


def test_a_model_that_waits_at_its_gates_may_have_real_threads() -> None:
    source = a_source()
    spec = spec_of(source.geometry, 5, machine(), prefetch="top_k")
    with real(8) as (arena, threads):
        engine, gates = Driven(source, spec, threads.machine, arena), 0
        for step_pass in source.passes():
            engine.begin(step_pass)
            for _ in range(source.geometry.layers):
                gates += 1
                engine.advance(lambda due=gates: len(source.executed) == due)
        ran = outcome_of(engine.close())
    assert ran["accesses"] == outcome_of(run(source, replace(spec, log=False)))["accesses"]
    assert ran["hits"] + ran["late"] + ran["misses"] == ran["accesses"]
