"""The search over links that read matrix by matrix finds faults of the reference engine in batches, rounds, stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given

from moereplay.simulator.reference.compute import Compute
from moereplay.simulator.reference.gate import Access, Served
from moereplay.simulator.reference.link import Link
from moereplay.simulator.reference.machine import Activity, BatchChannel, SimulatedAccelerator, SimulatedChannel
from moereplay.simulator.reference.state import Batch, Transfer
from moereplay.simulator.times import Times
from tests.kit.parity import by_matrix
from tests.kit.scenarios import Scenario
from tests.simulator.test_mutants import check_killed, compare, searched


@searched
@given(by_matrix())
def search(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@searched
@given(by_matrix(prefetch="top_k:factor=2"))
def search_prefetches(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


@searched
@given(by_matrix(miss="cascade:bits=8/2:below=.5"))
def search_precisions(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


def a_batch_is_one_demand(start: Callable) -> Callable:
    def mutant(self: Link, channel: BatchChannel) -> bool:
        others = [self._demands.pop() for _ in range(len(self._demands) - 1)]
        started = start(self, channel)
        self._demands.extend(reversed(others))
        return started

    return mutant


def a_stage_waits_for_the_first_matrix_alone(landed: Callable) -> Callable:
    return lambda self, matrix, batches, late: landed(self, 1, batches, late)


def a_delayed_hit_is_computed_before_it_lands(landed: Callable) -> Callable:
    return lambda self, matrix, batches, late: landed(self, matrix, batches, [])


def a_round_takes_what_is_there_at_once(due: Callable) -> Callable:
    def mutant(self: Compute, left: list[Access]) -> bool:
        there = self._links.any_started or any(access.served is not Served.FETCH for access in left)
        return there or due(self, left)

    return mutant


def a_round_waits_until_nothing_moves(_: Callable) -> Callable:
    def mutant(self: Compute, left: list[Access]) -> bool:
        return not self._links.moving and bool(left)

    return mutant


def links_leave_the_stages_their_rate(stage: Callable) -> Callable:
    def mutant(
        self: SimulatedAccelerator, layer: int, work: Sequence[tuple[int, int]], contended: bool, matrix: int
    ) -> Activity:
        return stage(self, layer, work, False, matrix)

    return mutant


def matrices_are_equal(of: Callable) -> Callable:
    return lambda self, ns, many: -(-ns * many // len(self.matrices))


def a_batch_is_read_expert_by_expert(batch_ns: Callable) -> Callable:
    def mutant(self: Times, link: int, copies: Sequence[tuple[int, int]], contended: bool = False) -> int:
        size = sum(self._tiers[precision][layer] for layer, precision in copies)
        share = self._left.link if contended else 1
        return self._platform.links[link].batch_ns(size, len(copies), share)

    return mutant


def the_last_expert_starts_a_batch(start: Callable) -> Callable:
    def mutant(self: SimulatedChannel, transfers: Sequence[Transfer], contended: bool) -> list[Activity]:
        return start(self, transfers[::-1], contended)

    return mutant


def the_experts_of_a_batch_land_in_the_other_order(complete: Callable) -> Callable:
    return lambda self, transfers: complete(self, transfers[::-1])


def a_matrix_wakes_nothing(landed: Callable) -> Callable:
    def mutant(self: Link, batch: Batch, last: bool, epoch: int) -> None:
        if last:
            landed(self, batch, last, epoch)
        else:
            batch.landed += 1

    return mutant


MUTANTS: list[tuple[type, str, Callable[[Any], Any]]] = [
    (Link, "_start_batch", a_batch_is_one_demand),
    (Compute, "_has_landed", a_stage_waits_for_the_first_matrix_alone),
    (Compute, "_round_is_due", a_round_takes_what_is_there_at_once),
    (Compute, "_round_is_due", a_round_waits_until_nothing_moves),
    (SimulatedAccelerator, "stage", links_leave_the_stages_their_rate),
    (Times, "of_matrices", matrices_are_equal),
    (Times, "batch_ns", a_batch_is_read_expert_by_expert),
    (Link, "_complete_all", the_experts_of_a_batch_land_in_the_other_order),
    (Link, "_matrix_landed", a_matrix_wakes_nothing),
]


@pytest.mark.long
@pytest.mark.parametrize(("owner", "name", "mutate"), MUTANTS, ids=[mutate.__name__ for _, _, mutate in MUTANTS])
def test_the_search_kills_a_mutant(owner: type, name: str, mutate: Callable[[Any], Any]) -> None:
    check_killed(search, owner, name, mutate)


@pytest.mark.long
def test_the_search_of_prefetches_kills_a_mutant() -> None:
    check_killed(search_prefetches, Compute, "_has_landed", a_delayed_hit_is_computed_before_it_lands)


@pytest.mark.long
def test_the_search_of_precisions_kills_a_mutant() -> None:
    """Experts of one batch differ in bytes only where they differ in precision."""
    check_killed(search_precisions, SimulatedChannel, "start_batch", the_last_expert_starts_a_batch)
