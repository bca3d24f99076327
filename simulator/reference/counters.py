"""Counters, lifetimes and the event log of a run.

Counters are kept per (layer, phase) and per request. Parity, timelines and first divergence compare logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import simpy

from moereplay.results.counters import COUNTERS, LIFETIME_BUCKETS, PHASES, queued, reported
from moereplay.results.result import Event, Row
from moereplay.simulator.reference.machine import Activity, Span
from moereplay.simulator.reference.state import Tables
from moereplay.simulator.source import Pass
from moereplay.traces.drafts import KNOWN


class Counters:
    """Statistics of a run. Work that a pass does once is charged to its first row; see `charge_to`."""

    def __init__(self, layers: int, arrivals: Sequence[int] = ()) -> None:
        """`arrivals` are by request, ns; empty if all are there at the start."""
        self._arrivals = arrivals
        self._cells = [[_zeros() for _ in PHASES] for _ in range(layers)]
        self._lifetimes = [[[0] * LIFETIME_BUCKETS for _ in PHASES] for _ in range(layers)]
        self._requests: dict[int, Row] = {}
        self.phase = 0
        self._row: Row = {}

    def begin_pass(self, now: int, step_pass: Pass) -> None:
        """Charge to this pass from now on; a request begins with its first pass."""
        for (request, phase), places in step_pass.kept_parts().items():
            if request not in self._requests:
                self._requests[request] = {
                    "request": request,
                    "start_ns": now,
                    "ttft_ns": None,
                    "decode_ns": 0,
                    "decode_passes": 0,
                    "decode_tokens": 0,
                    "end_ns": now,
                    "tokens": 0,
                    **queued(self._arrivals, request, now),
                    **_zeros(),
                }
            self.charge_to(request, phase)
            self._row["tokens"] += len(places)
            self._row["decode_tokens"] += len(places) if phase else 0
        self._count_drafts(step_pass)
        self.charge_to(step_pass.request, step_pass.phase)

    def _count_drafts(self, step_pass: Pass) -> None:
        for row in step_pass.rows:
            if row.draft != KNOWN:
                self.charge_to(row.request, row.phase)
                self.count("draft_rows", 0)
                self.count("draft_rejected", 0, int(not row.kept))

    def charge_to(self, request: int, phase: int) -> None:
        """Charge to this request and phase from now on, for work of single tokens of a pass."""
        self.phase, self._row = phase, self._requests[request]

    def end_pass(self, began: int, now: int, step_pass: Pass) -> None:
        """Add the pass's time to the TTFT or TPOT of every request in it."""
        for request, phase in step_pass.parts():
            row = self._requests[request]
            row["end_ns"] = now
            if phase == 0:
                row["ttft_ns"] = now - row["start_ns"]
                continue
            row["decode_ns"] += now - began
            row["decode_passes"] += 1

    def count(self, name: str, layer: int, amount: int = 1) -> None:
        """Add to a counter of this layer, phase and request."""
        self._cells[layer][self.phase][name] += amount
        self._row[name] += amount

    def charge(self, activity: Activity, name: str, layer: int) -> None:
        """Count an activity's time for the pass in which it begins, now if it is known, else at its end."""
        if activity.span is not None:
            self.count(name, layer, activity.span.spent)
            return
        add = self._here(layer)
        activity.measured(lambda span: add(name, span.spent))

    def _here(self, layer: int) -> Callable[[str, int], None]:
        """Return `count` bound to this layer and pass, for times that are known later."""
        cells = self._cells[layer][self.phase], self._row

        def add(name: str, amount: int) -> None:
            for cell in cells:
                cell[name] += amount

        return add

    def lived(self, layer: int, steps: int) -> None:
        """Record the lifetime of an evicted copy in steps."""
        self._lifetimes[layer][self.phase][min(steps.bit_length(), LIFETIME_BUCKETS - 1)] += 1

    def totals(self, end: int) -> Row:
        """Return sums over layers and phases."""
        cells = [cell for layer in self._cells for cell in layer]
        totals: Row = {name: sum(cell[name] for cell in cells) for name in COUNTERS}
        histograms = [histogram for layer in self._lifetimes for histogram in layer]
        return totals | {"time_ns": end, "lifetime": [sum(bucket) for bucket in zip(*histograms, strict=True)]}

    def per_layer(self) -> list[Row]:
        """Return a row per layer and phase, without phases that had no step."""
        return [
            {"layer": layer, "phase": PHASES[phase]}
            | reported(cell.values(), "layer")
            | {"lifetime": self._lifetimes[layer][phase]}
            for layer, cells in enumerate(self._cells)
            for phase, cell in enumerate(cells)
            if any(cell.values())
        ]

    def per_request(self) -> list[Row]:
        """Return a row per request in run order."""
        left_out = {name for name, counter in COUNTERS.items() if "request" not in counter.per}
        return [{name: it for name, it in row.items() if name not in left_out} for row in self._requests.values()]


def _zeros() -> Row:
    return dict.fromkeys(COUNTERS, 0)


# the event log

NO_EXPERT = -1


class EventLog:
    """Events in order, with their times; empty unless `keep`."""

    def __init__(self, env: simpy.Environment, tables: Tables, keep: bool) -> None:
        self._env, self._now, self._keep = env, tables.now, keep
        self.events: list[Event] = []

    def note(self, kind: str, y: int, cause: str) -> None:
        """Add an event that takes no time."""
        if self._keep:
            now = int(self._env.now)
            self._add(Span(now, now, 0), kind, y, cause)

    def begin(self, kind: str, y: int, activity: Activity, cause: str) -> None:
        """Add an activity at its start; its times may be filled in at its end."""
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
