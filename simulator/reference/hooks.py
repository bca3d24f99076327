"""Policies' hooks bound to a run, and victim selection by key or by the `victim` hook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Generic

from moereplay.policies.contract import Eviction, Memory, Own
from moereplay.policies.files import complaint
from moereplay.policies.grammar import Chosen, PolicyT
from moereplay.policies.hooks import EVENTS, HOOKS, given_by
from moereplay.simulator.config import PolicySet
from moereplay.simulator.reference.checks import CheckedCalls, KeyChecks, Order, ReadOnly
from moereplay.simulator.reference.state import Tables


class BoundPolicy(Generic[PolicyT]):
    """One policy with its memory. Every call of a user policy is checked: reads, writes and results."""

    def __init__(self, chosen: Chosen[PolicyT], tables: Tables, pools: Sequence[int]) -> None:
        self.chosen, self.policy, self.params = chosen, chosen.policy, chosen.params
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
            "reals": _zeros(max(layers, len(self._pools)), memory.reals, 0.0),
        }
        if self._checks is not None:
            tables = {name: self._checks.tables.memory(name, table) for name, table in tables.items()}
        given: Any = tuple if self._checks is None else ReadOnly
        self.own = Own(**tables, par=given(self._par), capacity=given(self._pools))

    def output(self, length: int) -> list[int]:
        """Return a list for a hook to write to."""
        return [0] * length if self._checks is None else self._checks.tables.output(length)

    def call(self, name: str, *given: Any) -> Any:
        """Call a hook; `given` are the step, for a hook at a gate, and the hook's own arguments."""
        if name not in self._hooks:
            raise AssertionError(f"{self.policy.kind} {self.policy.name} has no hook {name}")
        hook, function = self._hooks[name]
        if self._checks is not None:
            return self._checks.call(hook, function, self.own, given)
        return function(*hook.in_order(self._tables, self.own, given))


class BoundHooks:
    """The four policies of a run, and the listeners of every event."""

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
        """Memories of the four policies, in the order of KINDS."""
        return [bound.own for bound in self._all]

    def clear(self) -> None:
        """Zero every policy's memory."""
        for bound in self._all:
            bound.clear()


def _zeros(rows: int, columns: int, zero: float) -> list[list]:
    return [[zero] * columns for _ in range(rows)] if columns else []


# victim selection


class Victims:
    """Selects victims; caches a key while the policy's key scope keeps it valid."""

    def __init__(self, tables: Tables, eviction: BoundPolicy[Eviction]) -> None:
        self._tables, self._eviction = tables, eviction
        self._precisions = tables.now["precisions"]
        self._promises = (
            KeyChecks(eviction.chosen, partial(eviction.call, "key"), tables) if eviction.policy.version else None
        )
        self.clear()

    def clear(self) -> None:
        """Drop every key."""
        self._orders: dict[int, Order] = {}
        self._scope: object = None
        self._pass = self._tables.now["pass"]
        if self._promises:
            self._promises.move_on({}, same_pass=False)

    def invalidate(self, x: int) -> None:
        """Invalidate the keys of expert x's copies."""
        first = x * self._precisions
        for y in range(first, first + self._precisions):
            self._orders.pop(y, None)
            if self._promises:
                self._promises.forget(y)

    def choose(self, pool: int, y_in: int, candidates: set[int]) -> int:
        """Return the copy among `candidates` to evict for y_in. Raises PolicyError if the policy names another."""
        if self._eviction.policy.victim is None:
            return self._smallest(candidates)
        return self._by_hook(pool, y_in, candidates)

    @property
    def asks_of_each(self) -> bool:
        """True if `admit` is called for every victim before one is evicted."""
        return self._eviction.policy.admit is not None and not self._eviction.policy.decides_once

    def admits(self, y_in: int, prefetched: bool, y_out: int) -> bool:
        """Return True if the policy admits y_in at the cost of y_out."""
        admit = self._eviction.policy.admit
        if admit is None or self._eviction.call("admit", y_in, int(prefetched), y_out):
            return True
        if self._promises and not self._eviction.policy.declines(self._eviction.params):
            raise complaint(admit, f"hook admit rejected copy {y_in}; `declines` promises that it never does")
        return False

    def _smallest(self, candidates: set[int]) -> int:
        """Return the copy of smallest key; ties by least recent logical timestamp, then by lowest id."""
        self._drop_stale_keys()
        if self._promises:
            self._promises.check_kept(self._orders, sorted(candidates))
        for y in sorted(candidates.difference(self._orders)):
            self._orders[y] = self._order_of(y)
        if self._promises:
            self._promises.check_moved(self._orders)
        least = min(map(self._orders.__getitem__, candidates))[2]
        if self._tables.copies[least]["protected"]:  # as a last resort: its key changes when that ends
            for y in candidates:
                del self._orders[y]
        return least

    def _order_of(self, y: int) -> Order:
        key = self._eviction.call("key", y)
        if self._promises:
            self._promises.check_new(y, key)
        return key, self._tables.experts[y // self._precisions]["last_use"], y

    def _drop_stale_keys(self) -> None:
        now = self._tables.now
        scopes = {"touch": None, "pass": now["pass"], "step": (now["step"], now["gated"])}
        scopes["layer"] = scopes["step"]
        scope = scopes[self._eviction.policy.scope(self._eviction.params)]
        if scope != self._scope:
            if self._promises:
                self._promises.move_on(self._orders, same_pass=now["pass"] == self._pass)
            self._scope, self._pass = scope, now["pass"]
            self._orders.clear()

    def _by_hook(self, pool: int, y_in: int, candidates: set[int]) -> int:
        """Call `victim`, which reads `protected`: last-resort candidates are temporarily unpinned."""
        copies = self._tables.copies
        unpinned = [y for y in candidates if copies[y]["protected"]]
        for y in unpinned:
            copies[y]["protected"] = 0
        victim = self._eviction.call("victim", pool, y_in)
        for y in unpinned:
            copies[y]["protected"] = 1
        if victim not in candidates:
            raise complaint(
                self._eviction.policy.victim, f"hook victim returned {victim}, which is not a candidate of pool {pool}"
            )
        return victim
