"""A clock of real nanoseconds for the reference engine, and threads that do its activities."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import simpy
from simpy.events import EventPriority

from moereplay.simulator.reference.machine import LINK, Activity, Span

SWITCH_S = 1e-4  #: after which another Python thread may run
SECONDS_TO_END = 0.5  #: a read that takes longer is left to its thread, which ends with the process


class Done(NamedTuple):
    """What a thread has finished: `finish` runs where events run."""

    finish: Callable[[], object]
    phase: EventPriority


class RealClock(simpy.Environment):
    """Wall-clock nanoseconds, while it runs. It has no future: with nothing due it waits for what threads finish."""

    def __init__(self, at_rest: Callable[[int], None] = lambda now: None) -> None:
        """`at_rest` is called with the time whenever the engine has nothing left to do but wait."""
        super().__init__()
        self._done = queue.SimpleQueue[Done]()
        self._zero = time.perf_counter_ns()
        self._stands_at: int | None = None  # while it is paused
        self._runs = threading.Event()
        self._runs.set()
        self._at_rest = at_rest
        self.taken = 0  #: when what was finished last was taken up
        self.taken_of_link = False  #: whether that was a transfer

    @property
    def now(self) -> int:
        """Nanoseconds since the clock was made, without those for which it was paused."""
        stands_at = self._stands_at
        return time.perf_counter_ns() - self._zero if stands_at is None else stands_at

    def pause(self) -> None:
        """What happens until `resume` is not counted."""
        self._runs.clear()
        self._stands_at = self.now

    def resume(self) -> None:
        """The clock goes on from where it stands, if it does."""
        if self._stands_at is not None:
            self._zero = time.perf_counter_ns() - self._stands_at
            self._stands_at = None
            self._runs.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in this block is not counted."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def wait_until(self, moment: int) -> None:
        """From any thread: return when the clock shows this, however long it is paused before."""
        while (left := moment - self.now) > 0:
            self._runs.wait()
            time.sleep(left / 1e9)

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
        """Let the thread end when it has done what it was given; that is waited for as long as a user would."""
        self._tasks.put(None)
        self._thread.join(SECONDS_TO_END)

    def _work(self) -> None:
        while task := self._tasks.get():
            activity, work = task
            began, at = self._clock.now, time.perf_counter_ns()
            try:
                work()
            except Exception as error:
                self._clock.post(lambda failed=activity, error=error: failed.fail(error), self._phase)
                continue
            ended = began + time.perf_counter_ns() - at  # also of work that went on while the clock was paused
            self._clock.wait_until(ended)
            span = Span(began, ended, ended - began)
            self._clock.post(lambda over=activity, span=span: over.finish(span), self._phase)


@contextmanager
def undisturbed() -> Iterator[None]:
    """No cycle collector; threads change places quickly."""
    before = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.enable()
