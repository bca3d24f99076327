"""The event log: what happened when, to which copy and why. Parity, timelines and first divergence compare logs."""

from __future__ import annotations

from dataclasses import replace

import simpy

from moereplay.results.result import Event
from moereplay.simulator.reference.clock import Activity, Span
from moereplay.simulator.reference.tables import Tables

NO_EXPERT = -1


class EventLog:
    """Events in order, with their times; empty unless `keep`."""

    def __init__(self, env: simpy.Environment, tables: Tables, keep: bool) -> None:
        self._env, self._now, self._keep = env, tables.now, keep
        self.events: list[Event] = []

    def note(self, kind: str, y: int, cause: str) -> None:
        """An event that takes no time."""
        if self._keep:
            now = int(self._env.now)
            self._add(Span(now, now, 0), kind, y, cause)

    def begin(self, kind: str, y: int, activity: Activity, cause: str) -> None:
        """An activity was started: its place in the log is here; its times may be filled in at its end."""
        if not self._keep:
            return
        if activity.span is not None:
            self._add(activity.span, kind, y, cause)
            return
        line = len(self.events)
        self.note(kind, y, cause)
        activity.measured(lambda span: self._fill_in(line, span))

    def _fill_in(self, line: int, span: Span) -> None:
        self.events[line] = replace(self.events[line], t0=span.began, t1=span.ended)

    def _add(self, span: Span, kind: str, y: int, cause: str) -> None:
        now, layer, expert, precision = self._now, self._now["layer"], NO_EXPERT, 0
        if y != NO_EXPERT:
            x, precision = divmod(y, now["precisions"])
            layer, expert = divmod(x, now["experts"])
        self.events.append(Event(span.began, span.ended, kind, now["pass"], layer, expert, precision, cause))
