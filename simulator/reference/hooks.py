"""Policies' hooks bound to a run: each is called by its name, with the tables that the contract hands it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from moereplay.policies.contract import Memory, Own
from moereplay.policies.grammar import Chosen, PolicyT
from moereplay.policies.hooks import EVENTS, HOOKS, given_by
from moereplay.simulator.config import PolicySet
from moereplay.simulator.reference.checks.calls import CheckedCalls
from moereplay.simulator.reference.checks.tables import Given
from moereplay.simulator.reference.tables import Tables


class BoundPolicy(Generic[PolicyT]):
    """One policy with its memory. What a user's own policy reads, writes and returns is checked at every call."""

    def __init__(self, chosen: Chosen[PolicyT], tables: Tables, pools: Sequence[int]) -> None:
        self.policy, self.params = chosen.policy, chosen.params
        self._tables, self._pools, self._par = tables, tuple(pools), tuple(chosen.par())
        self._hooks = {name: (HOOKS[name], function) for name, function in given_by(chosen.policy)}
        self._checks = CheckedCalls(chosen.policy, tables) if chosen.policy.version else None
        self.clear()

    def clear(self) -> None:
        """Zero the memory."""
        memory: Memory = self.policy.memory
        rows, layers = len(self._tables.copies), self._tables.now["layers"]
        tables: dict[str, Any] = {
            "rows": _zeros(rows, memory.rows + memory.rows_per_expert * self._tables.now["experts"], 0),
            "regs": _zeros(len(self._pools), memory.regs, 0),
            "reals": _zeros(layers, memory.reals, 0.0),
        }
        if self._checks is not None:
            tables = {name: self._checks.tables.memory(name, table) for name, table in tables.items()}
        given: Any = tuple if self._checks is None else Given
        self.own = Own(**tables, par=given(self._par), capacity=given(self._pools))

    def output(self, length: int) -> list[int]:
        """Numbers for a hook to write to."""
        return [0] * length if self._checks is None else self._checks.tables.output(length)

    def call(self, name: str, *given: Any) -> Any:
        """What a hook returns; `given` are the step, for a hook at a gate, and what it takes beside the tables."""
        if name not in self._hooks:
            raise AssertionError(f"{self.policy.kind} {self.policy.name} was asked for a hook that it does not give")
        hook, function = self._hooks[name]
        if self._checks is not None:
            return self._checks.call(hook, function, self.own, given)
        return function(*hook.in_order(self._tables, self.own, given))


class BoundHooks:
    """The four policies of a run, and the events that any of them may listen to."""

    def __init__(self, chosen: PolicySet, tables: Tables, pools: Sequence[int]) -> None:
        self.routing = BoundPolicy(chosen.routing, tables, pools)
        self.prefetch = BoundPolicy(chosen.prefetch, tables, pools)
        self.eviction = BoundPolicy(chosen.eviction, tables, pools)
        self.miss = BoundPolicy(chosen.miss, tables, pools)
        self._all = (self.routing, self.prefetch, self.eviction, self.miss)
        self._listeners = {event: [each for each in self._all if getattr(each.policy, event)] for event in EVENTS}

    def notify(self, event: str, *given: Any) -> None:
        """Call the hook of every policy that listens to an event, in the order routing, prefetch, eviction, miss."""
        for listener in self._listeners[event]:
            listener.call(event, *given)

    @property
    def memories(self) -> list[Own]:
        """Of the four, in the order of KINDS."""
        return [bound.own for bound in self._all]

    def clear(self) -> None:
        """Zero every policy's memory."""
        for bound in self._all:
            bound.clear()


def _zeros(rows: int, columns: int, zero: float) -> list[list]:
    return [[zero] * columns for _ in range(rows)] if columns else []
