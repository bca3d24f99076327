"""The search for differences between the engines finds what it is for: deliberate faults of the reference engine.

The compiled engine stays as it is, so a fault in one engine alone is what every mutant amounts to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from moereplay.simulator.rates import NOT_YET
from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.compute import Compute
from moereplay.simulator.reference.counters import Counters
from moereplay.simulator.reference.engine import Engine
from moereplay.simulator.reference.gate import Demanded, Gatekeeper
from moereplay.simulator.reference.hooks import Victims
from moereplay.simulator.reference.link import Link
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.machine import Activity, SimulatedAccelerator, SimulatedChannel
from moereplay.simulator.reference.state import LowerTier, Transfer
from moereplay.simulator.source import Pass
from tests.kit.parity import anything, batched, priced, seen
from tests.kit.scenarios import Scenario

#: Scenarios until a mutant counts as survived; the parity test searches more, and without shrinking most die sooner.
CASES = 400


class DifferentError(Exception):
    """The engines disagree about a scenario, or the mutant cannot finish it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.settings)
        self.scenario = scenario


searched = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@searched
@given(anything())
def search(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@searched
@given(batched())
def search_batches(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@searched
@given(priced())
def search_prices(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@settings(searched, max_examples=10 * CASES)
@given(priced(prefetch="top_k:factor=2"))
def search_prices_of_prefetches(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@searched
@given(priced(miss="fiddler:ratio=2:goal=max:decode=cost"))
def search_prices_beside_a_cpu(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@searched
@given(priced())
def search_prices_in_pieces(scenario: Scenario) -> None:
    """Search where transfers arrive in two pieces. Raises DifferentError."""
    scenario.times["prices"]["link"]["first_piece"] = 0.5
    compare(scenario)


@searched
@given(priced(contract="atomic"))
def search_prices_without_overlap(scenario: Scenario) -> None:
    """Search where no expert is computed before all have arrived. Raises DifferentError."""
    scenario.times["prices"]["overlap"] = "none"
    compare(scenario)


def compare(scenario: Scenario) -> None:
    """Raises DifferentError."""
    correct = seen(scenario, "compiled")
    try:
        mutated = seen(scenario, "reference")
    except Exception as error:
        raise DifferentError(scenario) from error
    if mutated != correct:
        raise DifferentError(scenario)


def check_killed(searching: Callable[[], None], owner: type, name: str, mutate: Callable[[Any], Any]) -> None:
    """The search finds the mutant, and it is the mutant that it finds: without it the engines agree there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, mutate(getattr(owner, name)))
        with pytest.raises(DifferentError) as raised:
            searching()
    compare(raised.value.scenario)


def the_highest_id_wins_ties(smallest: Callable) -> Callable:
    def mutant(self: Victims, candidates: list[int]) -> int:
        smallest(self, candidates)
        return min(candidates, key=lambda y: (*self._orders[y][:2], -y))

    return mutant


def the_largest_key_leaves(smallest: Callable) -> Callable:
    def mutant(self: Victims, candidates: list[int]) -> int:
        smallest(self, candidates)
        return max(candidates, key=self._orders.__getitem__)

    return mutant


def prefetches_go_before_demands(start_one: Callable) -> Callable:
    def mutant(self: Link) -> bool:
        demands, self._demands = self._demands, type(self._demands)()
        started = start_one(self)
        self._demands = demands
        return started or start_one(self)

    return mutant


def the_highest_link_starts_first(_: Callable) -> Callable:
    def mutant(self: Links) -> None:
        for link in reversed(self._rows):
            link.wake()

    return mutant


def a_lower_tier_forgets_who_was_read(_: Callable) -> Callable:
    def mutant(self: LowerTier, y: int) -> None:
        """Its place in the order stays."""

    return mutant


def what_was_read_stays_held(_: Callable) -> Callable:
    def mutant(self: LowerTier, y: int) -> None:
        """It is never evicted."""

    return mutant


def pins_end_with_the_compute(computed: Callable) -> Callable:
    def mutant(self: Cache, y: int) -> None:
        computed(self, y)
        self.release(y)

    return mutant


def stalls_are_a_nanosecond_longer(count: Callable) -> Callable:
    def mutant(self: Counters, counter: str, layer: int, amount: int = 1) -> None:
        count(self, counter, layer, amount + (counter == "stall_ns" and amount > 0))

    return mutant


def time_goes_to_the_first_row_alone(end_pass: Callable) -> Callable:
    def mutant(self: Counters, began: int, now: int, step_pass: Pass) -> None:
        end_pass(self, began, now, step_pass._replace(rows=step_pass.rows[:1]))

    return mutant


def what_tokens_run_goes_to_the_first_row(settle: Callable) -> Callable:
    def mutant(self: Gatekeeper, demanded: Demanded, step_pass: Pass, layer: int) -> None:
        first = step_pass.rows[0]
        settle(
            self,
            demanded,
            step_pass._replace(rows=[row._replace(request=first.request) for row in step_pass.rows]),
            layer,
        )

    return mutant


def demands_are_queued_before_they_are_loaded(load: Callable) -> Callable:
    def mutant(self: Compute, transfers: list[Transfer], layer: int) -> Iterator[Any]:
        for transfer in transfers:
            self._links.fetch_announced(transfer)
        self._links.fetch_announced = lambda transfer: None
        yield from load(self, transfers, layer)
        del self._links.fetch_announced

    return mutant


def a_demand_to_be_loaded_is_not_queued(_: object) -> property:
    return property(lambda self: any(link.busy for link in self._rows))


def reads_begin_while_others_are_loaded(load: Callable) -> Callable:
    def mutant(self: Compute, transfers: list[Transfer], layer: int) -> Iterator[Any]:
        queues_together, self._queues_together = self._queues_together, False
        yield from load(self, transfers, layer)
        self._queues_together = queues_together

    return mutant


def arrivals_are_computed_as_they_come(all_here: Callable) -> Callable:
    def mutant(self: Compute, due: int, nothing_else: bool) -> bool:
        return bool(self._ready) or all_here(self, due, nothing_else)

    return mutant


def a_wire_is_idle_as_soon_as_it_is_free(start: Callable) -> Callable:
    def mutant(self: SimulatedChannel, transfer: Transfer, contended: bool) -> Activity:
        self._last_done = NOT_YET if self._last_done == int(self._env.now) else self._last_done
        return start(self, transfer, contended)

    return mutant


def links_leave_compute_its_rate(expert: Callable) -> Callable:
    def mutant(self: SimulatedAccelerator, layer: int, y: int, tokens: int, contended: bool, lands: int) -> Activity:
        return expert(self, layer, y, tokens, False, lands)

    return mutant


def only_the_first_row_looks_back(context: Callable) -> Callable:
    return lambda self, step_pass: context(self, step_pass._replace(rows=step_pass.rows[:1]))


def a_late_demand_waits_for_the_whole(_: Callable) -> Callable:
    return lambda self, transfer: None


def a_piece_is_enough_for_all_of_the_compute(expert: Callable) -> Callable:
    def mutant(self: SimulatedAccelerator, layer: int, y: int, tokens: int, contended: bool, lands: int) -> Activity:
        return expert(self, layer, y, tokens, contended, min(lands, 1))

    return mutant


def victims_cost_nothing(start: Callable) -> Callable:
    def mutant(self: SimulatedChannel, transfer: Transfer, contended: bool) -> Activity:
        transfer.victims = 0
        return start(self, transfer, contended)

    return mutant


def several_victims_cost_as_one(start: Callable) -> Callable:
    def mutant(self: SimulatedChannel, transfer: Transfer, contended: bool) -> Activity:
        transfer.victims = min(transfer.victims, 1)
        return start(self, transfer, contended)

    return mutant


def links_slow_decisions(dense: Callable) -> Callable:
    def mutant(
        self: SimulatedAccelerator, layer: int, tokens: int, context: int, contended: bool, decided: int
    ) -> Activity:
        return dense(self, layer, tokens, context, contended, decided * (1 + contended))

    return mutant


def prefetches_are_queued_before_they_are_loaded(_: Callable) -> Callable:
    def mutant(self: Compute, transfers: list[Transfer], layer: int) -> Iterator[Any]:
        for transfer in transfers:
            self._links.prefetch_announced(transfer)
        for transfer in transfers:
            yield self._loading(transfer, layer)

    return mutant


def prefetches_are_queued_when_all_are_loaded(_: Callable) -> Callable:
    def mutant(self: Compute, transfers: list[Transfer], layer: int) -> Iterator[Any]:
        for transfer in transfers:
            yield self._loading(transfer, layer)
        for transfer in transfers:
            self._links.prefetch_announced(transfer)

    return mutant


def a_prefetch_is_loaded_as_an_expert_of_this_layer(loading: Callable) -> Callable:
    def mutant(self: Compute, transfer: Transfer, layer: int) -> Activity:
        return loading(self, replace(transfer, layer=layer), layer)

    return mutant


def a_prefetch_to_be_loaded_keeps_links_busy(announce: Callable) -> Callable:
    def mutant(self: Links, transfer: Transfer) -> None:
        announce(self, transfer)
        self._announced += 1

    return mutant


MUTANTS: dict[Callable[[], None], list[tuple[type, str, Callable[[Any], Any]]]] = {
    search: [
        (Victims, "_smallest", the_highest_id_wins_ties),
        (Victims, "_smallest", the_largest_key_leaves),
        (Link, "_start_one", prefetches_go_before_demands),
        (Links, "wake", the_highest_link_starts_first),
        (LowerTier, "read", a_lower_tier_forgets_who_was_read),
        (LowerTier, "release", what_was_read_stays_held),
        (Cache, "computed", pins_end_with_the_compute),
        (Counters, "count", stalls_are_a_nanosecond_longer),
    ],
    search_batches: [
        (Counters, "end_pass", time_goes_to_the_first_row_alone),
        (Gatekeeper, "settle", what_tokens_run_goes_to_the_first_row),
    ],
    search_prices: [
        (Compute, "_load", demands_are_queued_before_they_are_loaded),
        (Compute, "_all_here", arrivals_are_computed_as_they_come),
        (SimulatedChannel, "start", a_wire_is_idle_as_soon_as_it_is_free),
        (SimulatedAccelerator, "expert", links_leave_compute_its_rate),
        (Engine, "_context", only_the_first_row_looks_back),
        (SimulatedAccelerator, "dense", links_slow_decisions),
        (SimulatedChannel, "start", victims_cost_nothing),
        (SimulatedChannel, "start", several_victims_cost_as_one),
    ],
    search_prices_without_overlap: [(Compute, "_load", reads_begin_while_others_are_loaded)],
    # Few of all cases prefetch well: a demand can be late, and a prefetch loaded, only where they do.
    search_prices_of_prefetches: [
        (Links, "meet", a_late_demand_waits_for_the_whole),
        (Links, "announce_prefetch", a_prefetch_to_be_loaded_keeps_links_busy),
        (Compute, "_load_prefetches", prefetches_are_queued_before_they_are_loaded),
        (Compute, "_load_prefetches", prefetches_are_queued_when_all_are_loaded),
        (Compute, "_loading", a_prefetch_is_loaded_as_an_expert_of_this_layer),
    ],
    search_prices_beside_a_cpu: [(Links, "busy", a_demand_to_be_loaded_is_not_queued)],
    # Few of all cases have a first piece, and no other price in whose time the rest arrives.
    search_prices_in_pieces: [(SimulatedAccelerator, "expert", a_piece_is_enough_for_all_of_the_compute)],
}
#: These die within the first cases, in about a second.
SOON = (time_goes_to_the_first_row_alone, what_tokens_run_goes_to_the_first_row)


@pytest.mark.parametrize(
    ("searching", "owner", "name", "mutate"),
    [
        pytest.param(searching, *row, id=row[2].__name__, marks=() if row[2] in SOON else pytest.mark.long)
        for searching, rows in MUTANTS.items()
        for row in rows
    ],
)
def test_a_search_kills_a_mutant(
    searching: Callable[[], None], owner: type, name: str, mutate: Callable[[Any], Any]
) -> None:
    check_killed(searching, owner, name, mutate)
