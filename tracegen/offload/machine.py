"""A machine of real threads for the reference engine: one computes, one reads experts into slots, one is the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moereplay.simulator.reference.machine import COMPUTE, CPU, LINK, Activity, Machine, Span
from moereplay.simulator.reference.state import Transfer
from moereplay.tracegen.offload.arena import Copies, Slots
from moereplay.tracegen.offload.clock import RealClock, Worker
from moereplay.tracegen.offload.compute import Layers
from moereplay.tracegen.offload.durations import DENSE, Computed, Durations, Moved, OnCpu


class _Asked(NamedTuple):
    """A computation whose end has not been followed by anything yet."""

    y: int
    layer: int
    tokens: int
    beside_link: bool
    begun: int


class _Processor:
    """The CPU beside the accelerator: computes misses from the slow tier, one after the other."""

    def __init__(self, clock: RealClock, layers: Layers, copies: Copies, durations: Durations) -> None:
        self._clock, self._layers, self._copies, self._durations = clock, layers, copies, durations
        self._worker = Worker(clock, CPU)
        self._free_at = 0

    def expert(self, layer: int, y: int, tokens: int, contended: bool) -> Activity:
        """On the CPU's thread."""
        asked = self._clock.now
        activity = self._worker.begin(lambda: self._compute(y, tokens))
        activity.measured(lambda _: self._computed(y, tokens, asked))
        return activity

    def _compute(self, y: int, tokens: int) -> None:
        weights = self._copies.weights(y, self._copies.on_host(y), self._layers.shape)
        self._layers.expert(weights, tokens)

    def _computed(self, y: int, tokens: int, asked: int) -> None:
        now = self._clock.taken
        self._durations.on_cpu.append(OnCpu(y, tokens, now - max(asked, self._free_at)))
        self._free_at = now

    def close(self) -> None:
        """The thread ends after what it has begun."""
        self._worker.close()


class RealMachine:
    """Accelerator, CPU and link of one run on one clock; `durations` is what it saw."""

    depth = 1

    def __init__(self, layers: Layers, on_cpu: Layers, slots: Slots, copies: Copies) -> None:
        """Three threads begin; `close` ends them."""
        self._layers, self._slots, self._copies = layers, slots, copies
        self.durations = Durations()
        self._asked: _Asked | None = None
        self._taken: int | None = None
        self._worked = 0
        self._under_way = 0  # transfers
        self._begun: dict[int, int] = {}  # by copy, of its last transfer
        self._in_this_turn: list[int] = []  # copies whose transfers began since compute was asked last
        self.clock = RealClock(self._end_of_turn)
        self._loader, self._accelerator = Worker(self.clock, LINK), Worker(self.clock, COMPUTE)
        self._processor = _Processor(self.clock, on_cpu, copies, self.durations)
        self.machine = Machine(self.clock, self, self._processor, (self,))

    def end(self, now: int) -> None:
        """The engine's run ended at `now`, and so did the last computation; its counters are put together later."""
        if self._taken is not None:
            self._end_of_turn(max(now, self._taken))

    def close(self) -> None:
        """All threads end after what they have begun."""
        self._loader.close()
        self._processor.close()
        self._accelerator.close()

    # accelerator

    def dense(self, layer: int, tokens: int) -> Activity:
        """On the compute thread."""
        return self._begin(DENSE, layer, tokens, lambda: self._layers.dense(layer, tokens))

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        """On the compute thread, from the slot that y has now."""
        slot = self._slots.of(y)
        self.durations.sizes[y] = self._copies.size(y)
        return self._begin(y, layer, tokens, lambda: self._compute(y, slot, tokens))

    def _compute(self, y: int, slot: Tensor, tokens: int) -> None:
        self._layers.expert(self._copies.weights(y, slot, self._layers.shape), tokens)

    def _begin(self, y: int, layer: int, tokens: int, work: Callable[[], None]) -> Activity:
        waited = self._asked is None and self.clock.taken_of_link  # for a transfer: deciding is part of what follows
        now = self.clock.now
        self._end_of_turn(now)
        self._asked = _Asked(y, layer, tokens, self._under_way > 0, self.clock.taken if waited else now)
        activity = self._accelerator.begin(work)
        activity.measured(self._take)
        return activity

    def _take(self, span: Span) -> None:
        self._taken, self._worked = self.clock.taken, span.spent

    def _end_of_turn(self, now: int) -> None:
        """What was computed is over: the engine goes on to the next, or waits."""
        if self._asked is not None and self._taken is not None:
            self.durations.computed.append(Computed(*self._asked, self._taken, now, self._worked))
            self._asked = self._taken = None
        for y in self._in_this_turn:
            self._begun[y] = now
        self._in_this_turn.clear()

    # link

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """On the loader's thread. One that follows another began when that had landed: its space was chosen then.

        One that begins at a gate, or at the end of a computation, began when the engine had decided all of that.
        """
        slot, y = self._slots.of(transfer.y), transfer.y
        follows = self.clock.taken_of_link and self._asked_after(self.clock.taken)
        self._begun[y] = self.clock.taken if follows else self.clock.now
        if not follows:
            self._in_this_turn.append(y)
        self._under_way += 1
        activity = self._loader.begin(lambda: self._copies.read(y, slot))
        activity.measured(lambda span: self._landed(y, span))
        return activity

    def _asked_after(self, taken: int) -> bool:
        """Whether nothing was asked of compute since then."""
        return self._asked is None or self._asked.begun < taken

    def _landed(self, y: int, span: Span) -> None:
        self._under_way -= 1
        self.durations.moved.append(Moved(y, self._copies.size(y), span.spent, self.clock.taken - self._begun[y]))

    def abandon(self) -> None:
        """The loader ends what it has begun; what takes the slot is read after that."""
