"""How much there is of what, over time: experts and bytes in the fast tier, transfers in flight, demands that wait."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from moereplay.analysis.timeline_moves import Copy, Machine, Move, copy_of
from moereplay.analysis.timeline_steps import Step
from moereplay.results.trace_events import Level


class Held(NamedTuple):
    """What there is from a nanosecond on, or by how much it changes."""

    experts: int = 0  #: resident copies, those in side buffers included
    resident: int = 0  #: their bytes
    arriving: int = 0  #: bytes under way into the fast tier
    demands: int = 0  #: transfers in flight for a demand, on any link
    prefetches: int = 0  #: the others
    waiting: int = 0  #: demands that are queued

    def plus(self, other: Held) -> Held:
        """The sum, field by field."""
        return Held(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self) -> Held:
        """The change that takes this away."""
        return Held(*(-each for each in self))

    def levels(self, t: int) -> Iterator[Level]:
        """As counters of the viewer."""
        yield Level("resident experts", t, {"experts": self.experts})
        yield Level("fast tier", t, {"resident bytes": self.resident, "arriving bytes": self.arriving})
        yield Level("in flight", t, {"demand": self.demands, "prefetch": self.prefetches})
        yield Level("demands queued", t, {"transfers": self.waiting})


class Levels:
    """What there is at every time at which it changes, in ns."""

    def __init__(self, steps: Iterable[Step], moves: Iterable[Move], machine: Machine) -> None:
        self._machine = machine
        self._changes: defaultdict[int, Held] = defaultdict(Held)
        self._lands: dict[Copy, int] = {}  # of each copy that is resident, or will be
        for layer, expert in machine.warm:
            self._land((layer, expert, 0), 0)
        starts = iter(moves)
        for event in (event for step in steps for event in step.events):
            if event.kind in ("transfer", "fill"):
                self._start(next(starts))
            elif event.kind == "evict":
                self._leave(copy_of(event), event.t0)
            elif event.kind == "reset":
                self._empty(event.t0)
        self._sum()

    def between(self, t0: int, t1: int) -> Iterator[Level]:
        """The levels at t0, then those that change until t1, t1 not included."""
        first, last = bisect_right(self._times, t0), bisect_left(self._times, t1)
        yield from self._held[first - 1].levels(t0)
        for at in range(first, last):
            before = self._held[at - 1].levels(self._times[at])
            after = self._held[at].levels(self._times[at])
            yield from (level for level, old in zip(after, before, strict=True) if level != old)

    def _add(self, t: int, change: Held) -> None:
        self._changes[t] = self._changes[t].plus(change)

    def _land(self, copy: Copy, t: int) -> None:
        self._lands[copy] = t
        self._add(t, self._resident(copy))

    def _resident(self, copy: Copy) -> Held:
        return Held(experts=1, resident=self._machine.size(copy))

    def _start(self, move: Move) -> None:
        fast, prefetch = move.event.kind == "transfer", move.event.cause == "prefetch"
        under_way = Held(arriving=move.size if fast else 0, demands=not prefetch, prefetches=prefetch)
        self._add(move.event.t0, under_way)
        self._add(move.ends, under_way.minus())
        if not prefetch and move.waits_from is not None:
            self._add(move.waits_from, Held(waiting=1))
            self._add(move.event.t0, Held(waiting=-1))
        if fast and move.event.cause != "streamed" and move.ends == move.event.t1:
            self._land(copy_of(move.event), move.ends)

    def _leave(self, copy: Copy, t: int) -> None:
        if self._lands.pop(copy, None) is not None:
            self._add(t, self._resident(copy).minus())

    def _empty(self, t: int) -> None:
        for copy in list(self._lands):
            self._leave(copy, t)

    def _sum(self) -> None:
        self._times = sorted({0, *self._changes})
        self._held = list(accumulate((self._changes[t] for t in self._times), Held.plus))
