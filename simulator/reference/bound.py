"""Policies bound to a run: the tables they share, and each one's own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

from policies.contract import ABSENT, COPY, EXPERT, NEVER, NOW, Memory, Own, Step
from policies.grammar import Chosen, PolicyT
from simulator.config import PolicySet
from traces.schema import Geometry


@dataclass(frozen=True)
class Shape:
    """The dense numbering of experts x = layer * E + e and copies y = x * P + p, and what a copy weighs."""

    geometry: Geometry
    tiers: tuple[tuple[int, ...], ...]  #: [p][layer] bytes

    @cached_property
    def precisions(self) -> int:
        """P."""
        return len(self.tiers)

    @cached_property
    def experts(self) -> int:
        """Experts of all layers."""
        return self.geometry.layers * self.geometry.experts


class Tables:
    """The rows that every policy sees, as dicts: written by the engine alone."""

    def __init__(self, shape: Shape, pools: Sequence[int], first_uses: Sequence[int], seed: int) -> None:
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
        for x, position in enumerate(first_uses):
            self.experts[x]["next_use"] = position
        self.clear()

    def _describe(self, shape: Shape, pools: int) -> None:
        for x, row in enumerate(self.experts):
            row["layer"], row["next_use"] = x // shape.geometry.experts, NEVER
        for y, row in enumerate(self.copies):
            layer = self.experts[y // shape.precisions]["layer"]
            row["bytes"] = shape.tiers[y % shape.precisions][layer]
            row["pool"] = layer if pools > 1 else 0

    def clear(self) -> None:
        """As at the start, but for the future."""
        for row in self.experts:
            row.update(last_use=0, last_pass=-1, hint_pass=-1, uses_ever=0, uses_here=0, mass_ever=0, needed=0)
        for row in self.copies:
            row.update(state=ABSENT, protected=0, entered=0, prefetched=0)


class Bound(Generic[PolicyT]):
    """One policy with its memory; calling a hook passes the tables in front of the hook's own arguments."""

    def __init__(self, chosen: Chosen[PolicyT], tables: Tables, pools: Sequence[int]) -> None:
        self.policy, self.params = chosen.policy, chosen.params
        self._tables, self._pools = tables, list(pools)
        self._par = chosen.par()
        self.clear()

    def clear(self) -> None:
        """Zero the memory."""
        memory: Memory = self.policy.memory
        rows, layers = len(self._tables.copies), self._tables.now["layers"]
        self.own = Own(
            rows=_zeros(rows, memory.rows, 0),
            regs=_zeros(len(self._pools), memory.regs, 0),
            reals=_zeros(layers, memory.reals, 0.0),
            par=self._par,
            capacity=self._pools,
        )

    def call(self, hook: Callable[..., Any] | None, *arguments: Any) -> Any:
        """hook(now, experts, copies, own, *arguments)."""
        tables = self._tables
        return self._given(hook)(tables.now, tables.experts, tables.copies, self.own, *arguments)

    def call_at_gate(self, hook: Callable[..., Any] | None, step: Step, *arguments: Any) -> Any:
        """hook(now, step, experts, copies, own, *arguments)."""
        tables = self._tables
        return self._given(hook)(tables.now, step, tables.experts, tables.copies, self.own, *arguments)

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
        self.on_use = self._listeners("on_use")
        self.on_insert = self._listeners("on_insert")
        self.on_evict = self._listeners("on_evict")
        self.on_predict = self._listeners("on_predict")

    def _listeners(self, event: str) -> Callable[..., None]:
        heard = [(bound, hook) for bound in self._all if (hook := getattr(bound.policy, event))]

        def tell(*arguments: int) -> None:
            for bound, hook in heard:
                bound.call(hook, *arguments)

        return tell

    def clear(self) -> None:
        """Zero every policy's memory."""
        for bound in self._all:
            bound.clear()


def _zeros(rows: int, columns: int, zero: float) -> list[list]:
    return [[zero] * columns for _ in range(rows)] if columns else []
