"""Machines for the reference engine beside the simulated one: times known late, times from a script, real threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import simpy
from simpy.events import EventPriority

from moereplay.simulator.interface import RunSpec
from moereplay.simulator.reference.machine import (
    COMPUTE,
    CPU,
    LINK,
    Activity,
    Channel,
    Machine,
    Planned,
    Priced,
    Span,
    of_link,
    simulated,
)
from moereplay.simulator.reference.state import Area, Transfer

if TYPE_CHECKING:
    from moereplay.tracegen.offload.machine import Worker


def simulation(spec: RunSpec) -> Machine:
    """The default."""
    return simulated(spec.times, spec.layout.precisions)


# ---------------------------------------------------------------- the simulated machine, telling times late


def known_at_the_end(spec: RunSpec) -> Machine:
    """The simulated machine, whose activities say how long they took only when they have ended."""
    env = simpy.Environment()
    known = simulated(spec.times, spec.layout.precisions)
    links = tuple(LateChannel(env, known, row) for row in range(len(known.links)))
    return Machine(env, Late(env, known), Late(env, known), links, LatePriced(env, known))


class Late:
    """Accelerator and CPU: the simulated times, computed on a clock that follows, announced by a timer."""

    def __init__(self, env: simpy.Environment, known: Machine) -> None:
        self._env, self._known = env, known

    def dense(self, layer: int, tokens: int) -> Activity:
        return self._later(COMPUTE, lambda: self._known.accelerator.dense(layer, tokens))

    def expert(self, layer: int, y: int, tokens: int, contended: bool | None = None, extra_ns: int = 0) -> Activity:
        if contended is None:
            return self._later(COMPUTE, lambda: self._known.accelerator.expert(layer, y, tokens))
        return self._later(CPU, lambda: self._known.cpu.expert(layer, y, tokens, contended, extra_ns))

    def _later(self, phase: EventPriority, start: Callable[[], Activity]) -> Activity:
        self._known.env._now = self._env.now  # pyright: ignore[reportAttributeAccessIssue]
        span = start().span
        assert span is not None
        activity = Activity(self._env, phase)
        timer = self._env.timeout(span.ended - int(self._env.now))
        timer.callbacks.append(lambda _: activity.finish(span))
        return activity


class LatePriced(Late):
    """The accelerator, as it is told what its times depend on."""

    def dense(self, layer: int, tokens: int, context: int = 0, contended: bool = False, decided: int = 0) -> Activity:
        return self._later(COMPUTE, lambda: self._priced.dense(layer, tokens, context, contended, decided))

    def expert(self, layer: int, y: int, tokens: int, contended: bool | None = None, lands: int = 0) -> Activity:
        return self._later(COMPUTE, lambda: self._priced.expert(layer, y, tokens, bool(contended), lands))

    def load(self, y: int) -> Activity:
        return self._later(COMPUTE, lambda: self._priced.load(y))

    def stage(self, layer: int, work: Sequence[tuple[int, int]], contended: bool, matrix: int) -> Activity:
        return self._later(COMPUTE, lambda: self._priced.stage(layer, work, contended, matrix))

    @property
    def _priced(self) -> Priced:
        assert self._known.priced is not None
        return self._known.priced


class LateChannel(Late):
    """The same delay for a link."""

    def __init__(self, env: simpy.Environment, known: Machine, row: int) -> None:
        super().__init__(env, known)
        self._channel, self._phase = known.links[row], of_link(row)
        self.depth = self._channel.depth

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        return self._later(self._phase, lambda: self._channel.start(transfer, contended))

    def abandon(self) -> None:
        self._channel.abandon()


# ---------------------------------------------------------------- a link by script


class Scripted:
    """A link whose transfers last what a script says, one after the other."""

    depth = 1

    def __init__(self, env: simpy.Environment, row: int, lasts: Callable[[Transfer], int]) -> None:
        self._env, self._row, self._lasts = env, row, lasts

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        now = int(self._env.now)
        spent = self._lasts(transfer)
        return Planned(self._env, of_link(self._row), Span(now, now + spent, spent))

    def abandon(self) -> None:
        pass


def with_links(machine: Machine, link: Callable[[simpy.Environment, int], Channel]) -> Machine:
    """The machine with other links on the same clock, each made of its row."""
    return replace(machine, links=tuple(link(machine.env, row) for row in range(len(machine.links))))


# ---------------------------------------------------------------- real threads


class Arena:
    """Slots of real memory, one copy each: what a real fast tier would do with what `Placement` is told."""

    def __init__(self, slots: int) -> None:
        self.content: list[int | None] = [None] * slots
        self.free = list(range(slots))
        self.slot: dict[int, int] = {}
        self.areas: dict[int, Area] = {}

    def warmed(self, y: int) -> None:
        self.placed(y, Area.POOL)
        self.content[self.slot[y]] = y

    def placed(self, y: int, area: Area) -> None:
        assert y not in self.slot
        self.slot[y], self.areas[y] = self.free.pop(), area

    def promoted(self, y: int) -> None:
        assert self.areas[y] is Area.SIDE and self.content[self.slot[y]] == y
        self.areas[y] = Area.POOL

    def vacated(self, y: int) -> None:
        del self.areas[y]
        self.free.append(self.slot.pop(y))


class RealMachine:
    """Threads that sleep for an accelerator, a CPU and a loader, which fills the arena's slots."""

    depth = 2

    def __init__(self, arena: Arena, sleep_s: float) -> None:
        from moereplay.tracegen.offload.machine import RealClock, Worker  # loads torch

        self._arena, self._sleep_s = arena, sleep_s
        self.clock = RealClock()
        self._workers = [Worker(self.clock, phase) for phase in (LINK, CPU, COMPUTE)]
        self._loader, self._cpu, self._gpu = self._workers
        self.machine = Machine(self.clock, self, Spare(self._cpu, sleep_s), (self,))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def dense(self, layer: int, tokens: int) -> Activity:
        return self._gpu.begin(lambda: time.sleep(self._sleep_s))

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        return self._gpu.begin(lambda: self._compute(y, self._arena.slot[y]))

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        slot = self._arena.slot[transfer.y]  # now: after a reset it may be another's
        return self._loader.begin(lambda: self._load(transfer.y, slot))

    def abandon(self) -> None:
        """The loader ends what it has begun; what takes the slot is loaded after that."""

    def _compute(self, y: int, slot: int) -> None:
        found = self._arena.content[slot]
        if found != y:
            raise AssertionError(f"copy {y} is computed from slot {slot}, which holds {found}")
        time.sleep(self._sleep_s)

    def _load(self, y: int, slot: int) -> None:
        self._arena.content[slot] = None
        time.sleep(self._sleep_s)
        self._arena.content[slot] = y


class Spare:
    """The CPU beside the accelerator."""

    def __init__(self, worker: Worker, sleep_s: float) -> None:
        self._worker, self._sleep_s = worker, sleep_s

    def expert(self, layer: int, y: int, tokens: int, contended: bool, extra_ns: int = 0) -> Activity:
        return self._worker.begin(lambda: time.sleep(self._sleep_s))
