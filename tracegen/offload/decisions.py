"""Who decides in a real run: the compiled engine in steps, or the reference engine."""

from __future__ import annotations

from moereplay.simulator.compiled.stepper import Stepper, can_step
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import FinishedRun
from moereplay.simulator.reference import engine as reference
from moereplay.simulator.reference.machine import Machine
from moereplay.simulator.reference.state import Placement
from moereplay.simulator.replay import Plan, source_of
from moereplay.simulator.steps import run
from moereplay.traces.schema import Trace
from moereplay.traces.texts import hint

AUTO, COMPILED, REFERENCE = WAYS = ("auto", "compiled", "reference")


def way_of(ready: Plan, wanted: str = AUTO) -> str:
    """Return the fastest way that this run allows, or the wanted one. Raises ConfigError where it is not possible."""
    if wanted not in WAYS:
        raise ConfigError(f"unknown --decisions {wanted!r}: {hint(wanted, WAYS)}")
    steps = can_step(ready.spec(True))
    if wanted == COMPILED and not steps:
        raise ConfigError(
            f"--decisions {wanted} cannot run misses that a CPU computes, nor prices of platform {ready.machine.name} "
            "that are more than a number; use reference"
        )
    return REFERENCE if wanted == REFERENCE or not steps else COMPILED


class Decider:
    """The decisions of one run, prepared before it so that they cost no time in it."""

    def __init__(self, trace: Trace, ready: Plan, way: str) -> None:
        """`way` is one of WAYS but `auto`."""
        self._trace, self._ready, self._spec = trace, ready, ready.spec(True)
        self._stepper = Stepper.of(trace, self._spec) if way == COMPILED else None

    def run(self, machine: Machine, placement: Placement) -> FinishedRun:
        """Run to the end on the machine."""
        if self._stepper is None:
            return reference.run(source_of(self._trace, self._ready), self._spec, machine, placement)
        return run(self._stepper, machine, placement, self._spec.warm)
