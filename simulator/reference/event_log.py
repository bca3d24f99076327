"""The event log: what happened when, to which copy and why. Parity, timelines and first divergence compare logs."""

from __future__ import annotations

import simpy

from results.result import Event
from simulator.reference.tables import Tables

NO_EXPERT = -1


class EventLog:
    """Knows the time, so that nobody else has to; keeps nothing unless asked to."""

    def __init__(self, env: simpy.Environment, tables: Tables, keep: bool) -> None:
        self._env, self._now, self._keep = env, tables.now, keep
        self.events: list[Event] = []

    def note(self, kind: str, y: int, cause: str) -> None:
        """Something that takes no time."""
        if self._keep:
            at = int(self._env.now)
            self._add(at, at, kind, y, cause)

    def begin(self, kind: str, y: int, spent: int, cause: str, after: int = 0) -> None:
        """Something that starts `after` ns from now and takes `spent`."""
        if self._keep:
            at = int(self._env.now) + after
            self._add(at, at + spent, kind, y, cause)

    def _add(self, t0: int, t1: int, kind: str, y: int, cause: str) -> None:
        now = self._now
        if y == NO_EXPERT:
            self.events.append(Event(t0, t1, kind, now["pass"], now["layer"], NO_EXPERT, 0, cause))
            return
        x, precision = divmod(y, now["precisions"])
        layer, expert = divmod(x, now["experts"])
        self.events.append(Event(t0, t1, kind, now["pass"], layer, expert, precision, cause))
