"""The total order of events: (time, phase, resource, issue number), with LINK before CPU before COMPUTE."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import simpy
from simpy.events import EventPriority

#: SimPy's priorities: the phase, and within LINK the resource. `of_link` gives those of links after the first.
LINK, CPU, COMPUTE = EventPriority(1), EventPriority(1001), EventPriority(1002)


def of_link(row: int) -> EventPriority:
    """Phase LINK of one link: at the same time the lower link comes first."""
    return EventPriority(LINK + row)


class Span(NamedTuple):
    """When an activity was, in ns of the clock, and how long it kept its resource."""

    began: int
    ended: int
    spent: int  #: less than ended - began where it shared its resource or waited for it


class Activity(simpy.Event):
    """Something that takes time: an event of its phase at its end.

    `span` is None until it is known: from the start under the simulated clock, at the end (`finish`) on a real machine.
    """

    def __init__(self, env: simpy.Environment, phase: EventPriority) -> None:
        super().__init__(env)
        self.callbacks: list
        self.span: Span | None = None
        self.first_piece: Activity | None = None  #: of a transfer: ends when compute may begin with what has arrived
        self._phase = phase

    def finish(self, span: Span) -> None:
        """It is over: an event of this time. Call it where the environment's events run."""
        self._ends_in(0)
        self.span = span

    def measured(self, use: Callable[[Span], None]) -> None:
        """Call `use` with the span: now if it is known, else first of all at the end."""
        if self.span is not None:
            use(self.span)
        else:
            self.then(lambda: use(self._known))

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` at the end, unless the activity failed (`fail`)."""
        self.callbacks.append(lambda _: act() if self.ok else None)

    @property
    def _known(self) -> Span:
        if self.span is None:
            raise AssertionError("an activity ended without a span; end it with `finish`")
        return self.span

    def _ends_in(self, delay: int) -> None:
        self._ok = True
        self._value = None
        self.env.schedule(self, priority=self._phase, delay=delay)


class Planned(Activity):
    """An activity of the simulated clock, whose span is known when it begins."""

    def __init__(self, env: simpy.Environment, phase: EventPriority, span: Span) -> None:
        super().__init__(env, phase)
        self._ends_in(span.ended - int(env.now))
        self.span = span


class Bell(simpy.Event):
    """What compute, or the end of a run, waits for: rung from any event, it is a COMPUTE event of its time."""

    def ring(self) -> None:
        """Wake the waiter."""
        self._ok = True
        self._value = None
        self.env.schedule(self, priority=COMPUTE)
