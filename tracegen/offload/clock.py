"""A clock of real nanoseconds for the reference engine, and threads that do its activities."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import simpy
from simpy.events import EventPriority

from simulator.reference.clock import LINK, Activity, Span


class Done(NamedTuple):
    """What a thread has finished: `finish` runs where events run."""

    finish: Callable[[], object]
    phase: EventPriority


class RealClock(simpy.Environment):
    """Wall-clock nanoseconds. It has no future: with nothing due it waits for what threads finish."""

    def __init__(self, at_rest: Callable[[int], None] = lambda now: None) -> None:
        """`at_rest` is called with the time whenever the engine has nothing left to do but wait."""
        super().__init__()
        self._done = queue.SimpleQueue[Done]()
        self._zero = time.perf_counter_ns()
        self._at_rest = at_rest
        self.taken = 0  #: when what was finished last was taken up
        self.taken_of_link = False  #: whether that was a transfer

    @property
    def now(self) -> int:
        """Nanoseconds since the clock was made."""
        return time.perf_counter_ns() - self._zero

    def post(self, finish: Callable[[], object], phase: EventPriority) -> None:
        """From any thread: `finish` runs where events run."""
        self._done.put(Done(finish, phase))

    def step(self) -> None:
        """What is due, transfers first; else wait."""
        while not self._queue or not self._done.empty():
            self._take()
        super().step()

    def _take(self) -> None:
        if not self._queue and self._done.empty():
            self._at_rest(self.now)
        done = self._done.get()
        self.taken, self.taken_of_link = self.now, done.phase == LINK
        done.finish()


class Worker:
    """A thread that works off activities in the order of their coming, until `close`."""

    def __init__(self, clock: RealClock, phase: EventPriority) -> None:
        self._clock, self._phase = clock, phase
        self._tasks = queue.SimpleQueue[tuple[Activity, Callable[[], None]] | None]()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> Activity:
        """An activity that ends when `work` has; it fails with what `work` raises."""
        activity = Activity(self._clock, self._phase)
        self._tasks.put((activity, work))
        return activity

    def close(self) -> None:
        """Let the thread end when it has done what it was given."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while task := self._tasks.get():
            activity, work = task
            began = self._clock.now
            try:
                work()
            except Exception as error:
                self._clock.post(lambda failed=activity, error=error: failed.fail(error), self._phase)
                continue
            ended = self._clock.now
            span = Span(began, ended, ended - began)
            self._clock.post(lambda over=activity, span=span: over.finish(span), self._phase)
