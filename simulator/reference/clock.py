"""The total order of events: (time, phase, issue number), with LINK before CPU before COMPUTE."""

from __future__ import annotations

import simpy
from simpy.events import EventPriority

LINK, CPU, COMPUTE = EventPriority(1), EventPriority(2), EventPriority(3)


class At(simpy.Event):
    """A point in time with a phase; SimPy's own Timeout has no say over ties."""

    def __init__(self, env: simpy.Environment, phase: EventPriority, delay: int) -> None:
        super().__init__(env)
        self.callbacks: list
        self._ok = True
        self._value = None
        env.schedule(self, priority=phase, delay=delay)


class Bell(simpy.Event):
    """What compute waits for; rung from a LINK or CPU event, it is heard as a COMPUTE event of the same time."""

    def ring(self) -> None:
        """Wake the waiter."""
        self._ok = True
        self._value = None
        self.env.schedule(self, priority=COMPUTE)
