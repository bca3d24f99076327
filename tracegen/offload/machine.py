"""A machine of real threads for the reference engine: one computes, one reads experts into slots, one is the CPU's."""

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
from torch import Tensor

from moereplay.simulator.compiled.engine import Stepper
from moereplay.simulator.interface import FinishedRun
from moereplay.simulator.reference import engine as reference
from moereplay.simulator.reference.machine import COMPUTE, CPU, LINK, Activity, Machine, Span
from moereplay.simulator.reference.state import Placement, Transfer
from moereplay.simulator.replay import Plan
from moereplay.simulator.steps import run
from moereplay.tracegen.offload.compute import Layers
from moereplay.tracegen.offload.durations import DENSE, Computed, Durations, Moved, OnCpu
from moereplay.tracegen.offload.memory import Slots
from moereplay.tracegen.offload.part import COMPILED
from moereplay.tracegen.offload.slow_tier import Copies
from moereplay.traces.schema import Trace
from moereplay.traces.units import SECOND


class _Requested(NamedTuple):
    """A computation whose end has not been followed by anything yet."""

    y: int
    layer: int
    tokens: int
    beside_link: bool
    begun: int


class _Processor:
    """The CPU, which computes misses from the slow tier, one after the other."""

    def __init__(self, clock: RealClock, layers: Layers, copies: Copies, durations: Durations) -> None:
        self._clock, self._layers, self._copies, self._durations = clock, layers, copies, durations
        self._worker = Worker(clock, CPU)
        self._free_at = 0

    def expert(self, layer: int, y: int, tokens: int, contended: bool, extra_ns: int = 0) -> Activity:
        """Start an expert on the CPU's thread."""
        asked = self._clock.now
        activity = self._worker.begin(lambda: self._compute(y, tokens))
        activity.measured(lambda _: self._computed(y, tokens, asked))
        return activity

    def _compute(self, y: int, tokens: int) -> None:
        self._copies.check(y, self._layers.expert(self._copies.on_host(y), self._copies.format(y).dtype, tokens))

    def _computed(self, y: int, tokens: int, asked: int) -> None:
        now = self._clock.taken
        self._durations.on_cpu.append(OnCpu(y, tokens, now - max(asked, self._free_at)))
        self._free_at = now

    def close(self) -> None:
        """End the thread after the work that it has begun."""
        self._worker.close()


class RealMachine:
    """Accelerator, CPU and link of one run on one clock; `durations` holds the measured times."""

    depth = 1

    def __init__(self, layers: Layers, on_cpu: Layers, slots: Slots, copies: Copies) -> None:
        """Start three threads, which `close` ends."""
        self._layers, self._slots, self._copies = layers, slots, copies
        self.durations = Durations()
        self._requested: _Requested | None = None
        self._taken: int | None = None
        self._worked = 0
        self._under_way = 0  # transfers
        self._begun: dict[int, int] = {}  # by copy, of its last transfer
        self._in_this_turn: list[int] = []  # copies whose transfers began since the last request to compute
        self.clock = RealClock(self._end_of_turn)
        self._loader = Worker(self.clock, LINK)
        with self.clock.paused():
            self._accelerator = Worker(self.clock, COMPUTE, lambda: layers.warm_up(copies.formats))
        self._processor = _Processor(self.clock, on_cpu, copies, self.durations)
        self.machine = Machine(self.clock, self, self._processor, (self,))

    def end(self, now: int) -> None:
        """Note that the run and its last computation ended at `now`; counters are summed up later."""
        if self._taken is not None:
            self._end_of_turn(max(now, self._taken))

    def close(self) -> None:
        """Stop all threads after their current activity."""
        self._loader.close()
        self._processor.close()
        self._accelerator.close()

    # accelerator

    def dense(self, layer: int, tokens: int) -> Activity:
        """Start a dense part on the compute thread."""
        return self._begin(DENSE, layer, tokens, lambda: self._layers.dense(layer, tokens))

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        """Start an expert on the compute thread, from the slot that y has now."""
        slot = self._slots.of(y)
        self.durations.sizes[y] = self._copies.size(y)
        return self._begin(y, layer, tokens, lambda: self._compute(y, slot, tokens))

    def _compute(self, y: int, slot: Tensor, tokens: int) -> None:
        size, dtype = self._copies.format(y)
        self._copies.check(y, self._layers.expert(slot[:size], dtype, tokens))

    def _begin(self, y: int, layer: int, tokens: int, work: Callable[[], None]) -> Activity:
        waited = (
            self._requested is None and self.clock.taken_of_link
        )  # for a transfer: deciding is part of what follows
        now = self.clock.now
        self._end_of_turn(now)
        self._requested = _Requested(y, layer, tokens, self._under_way > 0, self.clock.taken if waited else now)
        activity = self._accelerator.begin(work)
        activity.measured(self._take)
        return activity

    def _take(self, span: Span) -> None:
        self._taken, self._worked = self.clock.taken, span.spent

    def _end_of_turn(self, now: int) -> None:
        """End the current computation; the engine starts the next or waits."""
        if self._requested is not None and self._taken is not None:
            self.durations.computed.append(Computed(*self._requested, self._taken, now, self._worked))
            self._requested = self._taken = None
        for y in self._in_this_turn:
            self._begun[y] = now
        self._in_this_turn.clear()

    # link

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """Start a transfer on the loader's thread.

        Its recorded start is the landing of the transfer that it follows, when its space was chosen. A transfer that
        starts at a gate or at the end of a computation starts once the engine has made all decisions of that moment.
        """
        slot, y = self._slots.of(transfer.y), transfer.y
        follows = self.clock.taken_of_link and self._requested_after(self.clock.taken)
        self._begun[y] = self.clock.taken if follows else self.clock.now
        if not follows:
            self._in_this_turn.append(y)
        self._under_way += 1
        activity = self._loader.begin(lambda: self._copies.read(y, slot))
        activity.measured(lambda span: self._landed(y, span))
        return activity

    def _requested_after(self, taken: int) -> bool:
        """Return whether compute received no request since then."""
        return self._requested is None or self._requested.begun < taken

    def _landed(self, y: int, span: Span) -> None:
        self._under_way -= 1
        self.durations.moved.append(Moved(y, self._copies.size(y), span.spent, self.clock.taken - self._begun[y]))

    def abandon(self) -> None:
        """Let the loader finish its read; the next read into the slot starts after that."""


# -- A clock of real nanoseconds for the reference engine, and threads that do its activities.

SWITCH_S = 1e-4  #: after which another Python thread may run
SECONDS_TO_END = 0.5  #: a read that takes longer is left to its thread, which ends with the process


class Done(NamedTuple):
    """Completion of a thread's activity; the event loop runs `finish`."""

    finish: Callable[[], object]
    phase: EventPriority


class RealClock(simpy.Environment):
    """Wall-clock nanoseconds, while it runs. It has no future: with nothing due it waits for what threads finish."""

    def __init__(self, at_rest: Callable[[int], None] = lambda now: None) -> None:
        """Create the clock; `at_rest` is called with the time whenever the engine only waits."""
        super().__init__()
        self._done = queue.SimpleQueue[Done]()
        self._zero = time.perf_counter_ns()
        self._stands_at: int | None = None  # while it is paused
        self._runs = threading.Event()
        self._runs.set()
        self._at_rest = at_rest
        self.taken = 0  #: when the last finished work was noticed
        self.taken_of_link = False  #: whether that was a transfer

    @property
    def now(self) -> int:
        """Nanoseconds since the clock was made, without those for which it was paused."""
        stands_at = self._stands_at
        return time.perf_counter_ns() - self._zero if stands_at is None else stands_at

    def pause(self) -> None:
        """Stop the clock until `resume`."""
        self._runs.clear()
        self._stands_at = self.now

    def resume(self) -> None:
        """Resume the clock if it is paused."""
        if self._stands_at is not None:
            self._zero = time.perf_counter_ns() - self._stands_at
            self._stands_at = None
            self._runs.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock in this block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def wait_until(self, moment: int) -> None:
        """Wait until the clock reaches this time, across pauses. Thread-safe."""
        while (left := moment - self.now) > 0:
            self._runs.wait()
            time.sleep(left / SECOND)

    def post(self, finish: Callable[[], object], phase: EventPriority) -> None:
        """Schedule `finish` on the thread of events. Called from any thread."""
        self._done.put(Done(finish, phase))

    def step(self) -> None:
        """Run the events that are due, transfers first; otherwise wait."""
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

    def __init__(self, clock: RealClock, phase: EventPriority, first: Callable[[], None] = lambda: None) -> None:
        """Run `first` on the thread, and wait for it. Raises its error."""
        self._clock, self._phase = clock, phase
        self._tasks = queue.SimpleQueue[tuple[Activity, Callable[[], None]] | None]()
        started = queue.SimpleQueue[Exception | None]()
        self._thread = threading.Thread(target=self._work, args=(first, started), daemon=True)
        self._thread.start()
        if error := started.get():
            raise error

    def begin(self, work: Callable[[], None]) -> Activity:
        """Begin an activity that ends when `work` has ended, and fails with the error that `work` raises."""
        activity = Activity(self._clock, self._phase)
        self._tasks.put((activity, work))
        return activity

    def close(self) -> None:
        """End the thread after its remaining work; wait for it up to a time limit."""
        self._tasks.put(None)
        self._thread.join(SECONDS_TO_END)

    def _work(self, first: Callable[[], None], started: queue.SimpleQueue[Exception | None]) -> None:
        try:
            first()
        except Exception as error:
            started.put(error)
            return
        started.put(None)
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
    """Disable the garbage collector and shorten the thread switch interval."""
    before = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.enable()


# -- Decisions in a real run: the compiled engine in steps, or the reference engine


class Decider:
    """The decisions of one run, prepared before it so that they cost no time in it."""

    def __init__(self, trace: Trace, ready: Plan, way: str) -> None:
        """Prepare a run; `way` is one of WAYS except `auto`."""
        self._trace, self._ready, self._spec = trace, ready, ready.spec(True)
        self._stepper = Stepper.of(trace, self._spec) if way == COMPILED else None

    def run(self, machine: Machine, placement: Placement) -> FinishedRun:
        """Run to the end on the machine."""
        if self._stepper is None:
            return reference.run(self._spec.source_of(self._trace), self._spec, machine, placement)
        return run(self._stepper, machine, placement, self._spec.warm)
