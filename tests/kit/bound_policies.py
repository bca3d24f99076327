"""A policy bound to the tables of a small model, with no engine around it: hooks called one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.policies.contract import RESIDENT, UNIT, Step
from moereplay.policies.grammar import parse
from moereplay.simulator.interface import NO_ORACLE, CopyLayout
from moereplay.simulator.reference.hooks import BoundPolicy
from moereplay.simulator.reference.state import Tables
from tests.kit.policy_runs import Sizes, geometry_of

BARE = Step(*[()] * 10)


def units(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    """Probabilities or weights in UNITs."""
    return [[round(value * UNIT) for value in row] for row in rows]


class PolicyHarness:
    """One policy; `sizes` are the bytes of a copy by precision."""

    def __init__(self, kind: str, text: str, model: Sizes, sizes: Sequence[int] = (8,)) -> None:
        layout = CopyLayout(geometry_of(model), tuple((size,) * model.layers for size in sizes))
        self.tables = Tables(layout, (0,) * layout.experts, NO_ORACLE, seed=0)
        self.bound = BoundPolicy(parse(kind, text), self.tables, (100,))
        self.at()

    def at(self, **now: int) -> None:
        """Move on; a pass of one decoded token by default."""
        self.tables.now.update({"tokens": 1, "phase": 1, "gated": 1, "absent": -1} | now)

    def make_resident(self, *experts: int, layer: int = 0, precision: int = 0) -> None:
        """Put copies there."""
        now = self.tables.now
        for e in experts:
            self.tables.copies[(layer * now["experts"] + e) * now["precisions"] + precision]["state"] = RESIDENT

    def learn(self, expert: int, facts: Mapping[str, int]) -> None:
        """Write an expert's row."""
        self.tables.experts[expert].update(facts)

    def choose(
        self,
        ids: Sequence[int],
        scores: Sequence[float],
        gate: Sequence[float] = (),
        weights: Sequence[float] = (),
    ) -> list[int]:
        """A routing policy's row for one token; `weights` as recorded, in the order of `ids`."""
        step = BARE._replace(ids=[list(ids)], logits=[list(scores)], choice=[list(scores)], gate=units([gate]))
        step = step._replace(weight=units([weights]) if weights else ())
        out = [[-1] * len(ids)]
        self.ask("choose", step, out)
        return out[0]

    def suggest(self, step: Step) -> list[tuple[int, int]]:
        """(layer, expert) that a prefetch policy suggests."""
        if self.bound.policy.on_gate:
            self.ask("on_gate", step)
        out = [-1] * len(self.tables.copies)
        count, now = self.ask("suggest", step, out), self.tables.now
        return [divmod(y // now["precisions"], now["experts"]) for y in out[:count]]

    def resolve(self, step: Step, missing: Sequence[int], free: int = 0) -> list[int]:
        """A miss policy's verdicts."""
        verdict = [99] * len(missing)
        self.ask("resolve", step, list(missing), free, verdict)
        return verdict

    def want(self, step: Step, n: int) -> int:
        """The precision that a miss policy wants."""
        return self.ask("want", step, n)

    def substitute(self, step: Step, t: int, j: int, eligible: Sequence[int]) -> int:
        marks = [int(e in eligible) for e in range(self.tables.now["experts"])]
        return self.ask("substitute", step, t, j, marks)

    def call(self, hook: str, *arguments: int) -> Any:
        """An eviction hook's result."""
        return self.bound.call(hook, *arguments)

    def ask(self, hook: str, step: Step, *arguments: Any) -> Any:
        """A hook's result at a gate."""
        return self.bound.call(hook, step, *arguments)


def look_ahead(*scores: Sequence[float]) -> Step:
    """One token's scores of each layer ahead."""
    rows = [units([row]) for row in scores]
    order = [[sorted(range(len(row)), key=lambda e, row=row: (-row[e], e)) for row in each] for each in rows]
    return BARE._replace(look_score=rows, look_order=order)
