"""Who decides in a real run: a script if nothing is prefetched, or the compiled engine in steps, or the reference."""

from __future__ import annotations

from functools import partial

from simulator.compiled.stepper import Stepper, can_step
from simulator.decisions import Decisions
from simulator.errors import ConfigError
from simulator.interface import FinishedRun
from simulator.reference import engine as reference
from simulator.reference.machine import Machine, simulated
from simulator.reference.placement import Placement
from simulator.replay import Plan, source_of
from simulator.script import script_of
from simulator.steps import run
from traces.schema import Trace
from traces.spelling import hint

AUTO, SCRIPTED, COMPILED, REFERENCE = WAYS = ("auto", "scripted", "compiled", "reference")


def way_of(ready: Plan, wanted: str = AUTO) -> str:
    """The fastest way that this run allows, or the one that is wanted. Raises ConfigError where it cannot be."""
    if wanted not in WAYS:
        raise ConfigError(f"--decisions knows no {wanted!r}: {hint(wanted, WAYS)}")
    prefetches, steps = ready.chosen.prefetch.policy.suggest is not None, can_step(ready.spec(True))
    if wanted == AUTO:
        return REFERENCE if not steps else COMPILED if prefetches else SCRIPTED
    if wanted == SCRIPTED and prefetches:
        raise ConfigError(
            f"--decisions scripted: what prefetch {ready.chosen.prefetch.text()} does depends on timing; use compiled"
        )
    if wanted != REFERENCE and not steps:
        raise ConfigError(
            f"--decisions {wanted}: it knows no CPU beside compute, and no price of platform {ready.machine.name} that "
            "is more than a number; use reference"
        )
    return wanted


class Decider:
    """Made before a run, so that no time of it is spent on that."""

    def __init__(self, trace: Trace, ready: Plan, way: str) -> None:
        """`way` is one of WAYS but `auto`."""
        self._trace, self._ready, self._spec = trace, ready, ready.spec(True)
        self._decisions = self._made(way)

    def _made(self, way: str) -> Decisions | None:
        """None of the reference engine, which runs on the machine itself."""
        if way == REFERENCE:
            return None
        engine = partial(Stepper.of, self._trace, self._spec)
        if way == COMPILED:
            return engine()
        return script_of(engine, simulated(self._spec.times, self._spec.layout.precisions), self._spec.warm)

    def run(self, machine: Machine, placement: Placement) -> FinishedRun:
        """To the end, on the machine."""
        if self._decisions is None:
            return reference.run(source_of(self._trace, self._ready), self._spec, machine, placement)
        return run(self._decisions, machine, placement, self._spec.warm)
