"""The engine moved on from outside: a live model's forward pass cannot wait inside it, so it steps the engine."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from moereplay.simulator.reference.engine import Engine, FinishedRun, RunSpec
from moereplay.simulator.reference.machine import Machine
from moereplay.simulator.reference.placement import Placement
from moereplay.simulator.source import Gates, Pass


class Driven:
    """A run whose passes are known one at a time.

    `begin` a pass, `advance` at each of its gates, `close` at the end. The events are those of `run`: a pass begins at
    the time, and in the place, at which the one before it ended.
    """

    def __init__(
        self, source: Gates, spec: RunSpec, machine: Machine | None = None, placement: Placement | None = None
    ) -> None:
        """`machine` and `placement` are those of `run`."""
        self._engine = Engine(source, spec, machine, placement)
        self._engine.warm_up()
        self._process: simpy.Process | None = None

    def begin(self, step_pass: Pass) -> None:
        """The next pass."""
        self._process = self._engine.env.process(self._engine.forward(step_pass))

    def advance(self, done: Callable[[], bool]) -> None:
        """Run events until `done()` holds. Raises what a policy raised."""
        while not done():
            self._engine.env.step()
        failure = self._process.value if self._process is not None and self._process.triggered else None
        if isinstance(failure, BaseException):
            raise failure

    @property
    def waits_for_a_pass(self) -> bool:
        """Whether the pass that began last has ended."""
        return self._process is None or self._process.triggered

    def close(self) -> FinishedRun:
        """The run ends with its last step; what is then on the link is abandoned."""
        return self._engine.close()
