"""The event log cut into steps, and what compute waits for in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from moereplay.results.result import Event

MISSED = ("compulsory", "collisions", "capacity")
LOOKED_UP = ("hits", "late", *MISSED)
BUSY = ("expert", "load", "head")  #: of compute, after the gate


class Step(NamedTuple):
    """One pass at one layer: times in ns, and what was logged from its start to the next one's."""

    step_pass: int
    layer: int
    begin: int
    gate: int
    end: int
    events: Sequence[Event]


class Stall(NamedTuple):
    """From t0 to t1, in ns, compute waits for these experts, the one that it goes on with first, and for the CPU's."""

    t0: int
    t1: int
    transfers: Sequence[Event]  #: their look-ups, or where the wait ends with one of them its compute
    cpu: Sequence[Event]


def steps_of(events: Sequence[Event], end_ns: int) -> list[Step]:
    """The steps of a whole log in order. A step ends when the next one starts, the last with the run, at `end_ns`."""
    starts = [at for at, event in enumerate(events) if event.kind == "dense"]
    ends = [*(events[at].t0 for at in starts), end_ns][1:]
    cuts = pairwise([*starts, len(events)])
    return [_step(events[first:last], end) for (first, last), end in zip(cuts, ends, strict=True)]


def _step(events: Sequence[Event], end: int) -> Step:
    dense = events[0]
    return Step(dense.step_pass, dense.layer, dense.t0, dense.t1, end, events)


def stalls_of(step: Step) -> Iterator[Stall]:
    """Everything between gate and end in which compute does nothing, in order."""
    at, waits = step.gate, _Waits(step)
    for event in step.events:
        acts = event.kind in BUSY
        if (acts or event.kind in LOOKED_UP) and event.t0 > at:
            yield waits.stall(at, event.t0, event)
            at = event.t0
        waits.follow(event)
        at = event.t1 if acts else at
    if step.end > at:
        yield waits.stall(at, step.end, None)


class _Waits:
    """What compute has looked up and not yet got. What is dropped or replaced is never computed, so nobody waits."""

    def __init__(self, step: Step) -> None:
        self._computed = {event.expert for event in step.events if event.kind == "expert"}
        self._transfers: dict[int, Event] = {}
        self._cpu: list[Event] = []

    def follow(self, event: Event) -> None:
        """Go on by one line of the log."""
        if event.kind == "late" or (event.kind in MISSED and event.expert in self._computed):
            self._transfers[event.expert] = event
        elif event.kind == "expert":
            self._transfers.pop(event.expert, None)
        elif event.kind == "cpu":
            self._cpu.append(event)

    def stall(self, t0: int, t1: int, ends: Event | None) -> Stall:
        """From t0 until `ends` goes on at t1."""
        others = dict(self._transfers)
        first = []
        if ends is not None and ends.kind == "expert" and others.pop(ends.expert, None):
            first = [ends]
        return Stall(t0, t1, [*first, *others.values()], [event for event in self._cpu if event.t1 > t0])
