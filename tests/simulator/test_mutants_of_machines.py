"""Deliberate faults of the reference engine where the CPU reads a lower tier: the parity search finds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from moereplay.policies.contract import ABSENT
from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.cpu import CpuQueue
from moereplay.simulator.reference.gate import Demanded, Gatekeeper
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.state import LowerTier, Transfer
from tests.kit.parity import hybrid
from tests.kit.scenarios import Scenario
from tests.simulator.test_mutants import check_killed, compare, searched


@searched
@given(hybrid())
def search(scenario: Scenario) -> None:
    """Raises DifferentError."""
    compare(scenario)


def a_hold_ends_those_of_others(_: Callable) -> Callable:
    def mutant(self: LowerTier, y: int) -> None:
        self._held[y] = 0

    return mutant


def what_the_cpu_finds_is_not_read(read_by_cpu: Callable) -> Callable:
    def mutant(self: Links, transfer: Transfer) -> bool:
        if self._cpu_tier >= 0 and transfer.y in (tier := self._lower[self._cpu_tier]):
            tier.hold(transfer.y)
            return True
        return read_by_cpu(self, transfer)

    return mutant


def the_links_sleep_when_a_work_ends(computed: Callable) -> Callable:
    def mutant(self: CpuQueue, y: int) -> None:
        self._has_tier = False
        computed(self, y)
        self._has_tier = True

    return mutant


def landed_work_is_judged_with_that_of_the_gate(begin: Callable) -> Callable:
    def mutant(self: CpuQueue, access: Any, contended: bool, extra_ns: int = 0) -> None:
        begin(self, access, contended and not self._coming, extra_ns)

    return mutant


def a_prefetch_behind_the_cpu_is_lost(filled: Callable) -> Callable:
    def mutant(self: Links, transfer: Transfer) -> None:
        onward, transfer.onward = transfer.onward, None
        if onward is not None:
            self._cache.forget(onward.y)
        filled(self, transfer)

    return mutant


def residents_leave_with_a_reset(clear: Callable) -> Callable:
    def mutant(self: Cache) -> None:
        is_reset = hasattr(self, "_used")  # the first call is that of the constructor
        clear(self)
        for y in self._for_good if is_reset else ():
            self._set(y, ABSENT)

    return mutant


def the_first_pass_was_predictable(count: Callable) -> Callable:
    def mutant(self: Gatekeeper, demanded: Demanded, layer: int) -> None:
        self._gated.add(layer)
        count(self, demanded, layer)

    return mutant


MUTANTS: dict[str, tuple[type, str, Callable[[Callable], Callable]]] = {
    "a hold ends those of others": (LowerTier, "release", a_hold_ends_those_of_others),
    "what the CPU finds is not read": (Links, "read_by_cpu", what_the_cpu_finds_is_not_read),
    "the links sleep when a work ends": (CpuQueue, "_computed", the_links_sleep_when_a_work_ends),
    "landed work is judged with that of the gate": (CpuQueue, "_begin", landed_work_is_judged_with_that_of_the_gate),
    "a prefetch behind the CPU is lost": (Links, "_filled_for_cpu", a_prefetch_behind_the_cpu_is_lost),
    "residents leave with a reset": (Cache, "clear", residents_leave_with_a_reset),
    "the first pass was predictable": (Gatekeeper, "_count_demand", the_first_pass_was_predictable),
}


@pytest.mark.long
@pytest.mark.parametrize("owner, method, mutate", MUTANTS.values(), ids=MUTANTS)
def test_a_fault_of_the_reference_is_found(owner: type, method: str, mutate: Callable[[Callable], Callable]) -> None:
    check_killed(search, owner, method, mutate)
