"""Policies bound to a run: the tables they share, and each one's own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

from policies.contract import ABSENT, COPY, EXPERT, NEVER, NOW, Memory, Own, Step
from policies.grammar import Chosen, PolicyT
from simulator.config import PolicySet
from simulator.foreknown import Known
from simulator.reference.guarded import Given, Guard
from simulator.reference.supervisor import Supervisor
from simulator.setting import Shape


class Tables:
    """The rows that every policy sees, as dicts: written by the engine alone."""

    def __init__(self, shape: Shape, pools: Sequence[int], known: Known, seed: int) -> None:
        geometry = shape.geometry
        self.now = dict.fromkeys(NOW.names or (), 0) | {
            "layers": geometry.layers,
            "experts": geometry.experts,
            "k": geometry.k,
            "precisions": shape.precisions,
            "seed": seed,
        }
        self.experts = [dict.fromkeys(EXPERT.names or (), 0) for _ in range(shape.experts)]
        self.copies = [dict.fromkeys(COPY.names or (), 0) for _ in range(shape.experts * shape.precisions)]
        self._describe(shape, len(pools))
        for x, position in enumerate(known.first_uses):
            self.experts[x]["next_use"] = position
        for x, first_pass in enumerate(known.first_passes):
            self.experts[x]["next_pass"] = first_pass
        self._rank(known.ranking, len(pools))
        self.clear()

    def _describe(self, shape: Shape, pools: int) -> None:
        for x, row in enumerate(self.experts):
            row["layer"] = x // shape.geometry.experts
            row["next_use"] = row["next_pass"] = row["profile"] = NEVER
        for y, row in enumerate(self.copies):
            layer = self.experts[y // shape.precisions]["layer"]
            row["bytes"] = shape.tiers[y % shape.precisions][layer]
            row["pool"] = layer if pools > 1 else 0

    def _rank(self, ranking: Sequence[int], pools: int) -> None:
        """How many bytes of its pool a profile gives away before it comes to each expert."""
        taken = [0] * pools
        for x in ranking:
            copy = self.copies[x * self.now["precisions"]]
            self.experts[x]["profile"] = taken[copy["pool"]]
            taken[copy["pool"]] += copy["bytes"]

    def clear(self) -> None:
        """As at the start, but for the future and the profile."""
        for row in self.experts:
            row.update(last_use=0, last_pass=-1, hint_pass=-1, last_hint=0, uses_ever=0, uses_here=0)
            row.update(mass_ever=0, needed=0)
        for row in self.copies:
            row.update(state=ABSENT, protected=0, entered=0, prefetched=0)


class Bound(Generic[PolicyT]):
    """One policy with its memory; calling a hook passes the tables in front of the hook's own arguments."""

    def __init__(self, chosen: Chosen[PolicyT], tables: Tables, pools: Sequence[int]) -> None:
        self.policy, self.params = chosen.policy, chosen.params
        self._tables, self._pools, self._par = tables, tuple(pools), tuple(chosen.par())
        own_file = bool(chosen.policy.version)
        self._guard = Guard(chosen.policy, tables) if own_file else None
        self._supervisor = Supervisor(chosen.policy, tables.now, tables.copies) if own_file else None
        self._seen: Any = self._guard or tables
        self._never_writes = getattr(chosen.policy, "key", None)
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
        if self._guard is not None:
            tables = {name: self._guard.memory(name, table) for name, table in tables.items()}
        given: Any = tuple if self._guard is None else Given
        self.own = Own(**tables, par=given(self._par), capacity=given(self._pools))

    def output(self, length: int) -> list[int]:
        """Numbers for a hook to write to."""
        return [0] * length if self._guard is None else self._guard.output(length)

    def call(self, hook: Callable[..., Any] | None, *arguments: Any) -> Any:
        """hook(now, experts, copies, own, *arguments)."""
        seen = self._seen
        if self._guard is not None:
            self._guard.sealed = hook is self._never_writes
        return self._called(hook, (seen.now, seen.experts, seen.copies, self.own), arguments)

    def call_at_gate(self, hook: Callable[..., Any] | None, step: Step, *arguments: Any) -> Any:
        """hook(now, step, experts, copies, own, *arguments)."""
        seen = self._seen
        if self._guard is not None:
            step, self._guard.sealed = self._guard.step(step), False
        return self._called(hook, (seen.now, step, seen.experts, seen.copies, self.own), arguments)

    def _called(self, hook: Callable[..., Any] | None, tables: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        given = self._given(hook)
        if self._supervisor is None:
            return given(*tables, *arguments)
        return self._supervisor.call(given, tables, arguments)

    def _given(self, hook: Callable[..., Any] | None) -> Callable[..., Any]:
        if hook is None:
            raise AssertionError(f"{self.policy.kind} {self.policy.name} was asked for a hook that it does not give")
        return hook


class Hands:
    """The four policies of a run, and the events that any of them may listen to."""

    def __init__(self, chosen: PolicySet, tables: Tables, pools: Sequence[int]) -> None:
        self.routing = Bound(chosen.routing, tables, pools)
        self.prefetch = Bound(chosen.prefetch, tables, pools)
        self.eviction = Bound(chosen.eviction, tables, pools)
        self.miss = Bound(chosen.miss, tables, pools)
        self._all = (self.routing, self.prefetch, self.eviction, self.miss)
        self._at_gate = [bound for bound in self._all if bound.policy.on_gate]
        self.on_use = self._listeners("on_use")
        self.on_insert = self._listeners("on_insert")
        self.on_evict = self._listeners("on_evict")
        self.on_predict = self._listeners("on_predict")

    def on_gate(self, step: Step) -> None:
        """Every policy that listens hears of the demand."""
        for bound in self._at_gate:
            bound.call_at_gate(bound.policy.on_gate, step)

    def _listeners(self, event: str) -> Callable[..., None]:
        heard = [(bound, hook) for bound in self._all if (hook := getattr(bound.policy, event))]

        def tell(*arguments: int) -> None:
            for bound, hook in heard:
                bound.call(hook, *arguments)

        return tell

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
