"""Measured durations of a run, which a replay of the run may use instead of a platform's prices."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import simpy

from moereplay.simulator.reference.machine import COMPUTE, CPU, LINK, Activity, Machine, Planned, Span
from moereplay.simulator.reference.state import Transfer

DENSE = -1  #: in place of an expert


class Computed(NamedTuple):
    """One activity of the accelerator."""

    y: int  #: expert, or DENSE
    layer: int
    tokens: int
    beside_link: bool  #: whether a transfer was under way when it began
    begun: int  #: time of the engine's request, ns
    taken: int  #: the engine learnt of its end
    over: int  #: time of the engine's next request, or when nothing was left to do
    worked: int = 0  #: the compute thread's own time, ns

    @property
    def spent(self) -> int:
        """Computed and handed over, ns."""
        return self.taken - self.begun

    @property
    def decided(self) -> int:
        """Time until the engine had decided what comes next, ns; after a dense part, the gate."""
        return self.over - self.taken

    @property
    def lasted(self) -> int:
        """Time until the engine continued, ns: computed, handed over and decided."""
        return self.over - self.begun


class Step(NamedTuple):
    """One layer of one pass: its parts in nanoseconds, whose sum is the time until the next step began."""

    step_pass: int
    layer: int
    dense: int  #: with the decisions of its gate
    expert: int
    stall: int  #: compute had nothing to do


class Moved(NamedTuple):
    """One transfer."""

    y: int
    size: int  #: bytes
    read: int  #: the thread's own time, ns
    spent: int  #: from choosing what leaves until the engine learnt of its end, ns


class OnCpu(NamedTuple):
    """One expert that the CPU has computed."""

    y: int
    tokens: int
    spent: int  #: from its request, or the end of the previous one, until the engine noticed its end, ns


@dataclass
class Durations:
    """Durations of one run, in the order in which activities began."""

    computed: list[Computed] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    on_cpu: list[OnCpu] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  #: bytes of every copy that was computed

    @property
    def gate_ns(self) -> float:
        """Mean time that decisions took after a dense part: at a gate."""
        return fmean([each.decided for each in self.computed if each.y == DENSE] or [0])

    @property
    def passes(self) -> list[int]:
        """Start of each pass, and end of the last activity, in ns."""
        begins = [each.begun for each in self.computed if each.y == DENSE and each.layer == 0]
        return [*begins, self.computed[-1].over]

    @property
    def engine_ns(self) -> int:
        """The part of all computations in which no compute thread worked: threads handed over, the engine decided."""
        return sum(each.lasted - each.worked for each in self.computed)

    def steps(self) -> list[Step]:
        """Return the steps in order. A replay of these durations splits its time in the same way."""
        firsts = [at for at, each in enumerate(self.computed) if each.y == DENSE]
        steps, step_pass = list[Step](), -1
        for first, after in pairwise([*firsts, len(self.computed)]):
            dense, experts = self.computed[first], self.computed[first + 1 : after]
            end = self.computed[after].begun if after < len(self.computed) else self.computed[-1].over
            busy = sum(expert.lasted for expert in experts)
            step_pass += dense.layer == 0
            steps.append(Step(step_pass, dense.layer, dense.lasted, busy, end - dense.over - busy))
        return steps


def as_machine(durations: Durations) -> Machine:
    """Return a simulated machine that replays the measured durations.

    An activity that did not occur in the run (a replay may prefetch what the run loaded on demand) takes the mean of
    its kind.
    """
    env = simpy.Environment()
    return Machine(env, _Accelerator(env, durations), _Processor(env, durations), (_Channel(env, durations),))


class _Accelerator:
    """Replay measured durations: the n-th dense part takes its n-th time, an expert its time after that part."""

    def __init__(self, env: simpy.Environment, durations: Durations) -> None:
        self._env, self._at = env, -1
        self._dense: list[int] = []
        self._experts: dict[tuple[int, int], int] = {}
        for each in durations.computed:
            if each.y == DENSE:
                self._dense.append(each.lasted)
            else:
                self._experts[len(self._dense) - 1, each.y] = each.lasted
        self._mean = _mean(list(self._experts.values()))

    def dense(self, layer: int, tokens: int) -> Activity:
        """Return the duration of the next dense part of the measured run."""
        self._at += 1
        return self._lasts(self._dense[self._at])

    def expert(self, layer: int, y: int, tokens: int) -> Activity:
        """Return this copy's duration in that step, or the mean of all if it did not run then."""
        return self._lasts(self._experts.get((self._at, y), self._mean))

    def _lasts(self, spent: int) -> Activity:
        now = int(self._env.now)
        return Planned(self._env, COMPUTE, Span(now, now + spent, spent))


class _Channel:
    """Replay measured durations: the n-th transfer of an expert takes its n-th measured time."""

    depth = 1

    def __init__(self, env: simpy.Environment, durations: Durations) -> None:
        self._env = env
        self._moves = defaultdict[int, deque[int]](deque)
        for each in durations.moved:
            self._moves[each.y].append(each.spent)
        self._mean = _mean([each.spent for each in durations.moved])

    def start(self, transfer: Transfer, contended: bool) -> Activity:
        """Return the duration of this copy's next transfer, or the mean of all."""
        own, now = self._moves[transfer.y], int(self._env.now)
        spent = own.popleft() if own else self._mean
        return Planned(self._env, LINK, Span(now, now + spent, spent))

    def abandon(self) -> None:
        """Let the next transfer start without waiting."""


class _Processor:
    """Replays measured computations on the CPU: the n-th of an expert takes its n-th measured time, one at a time."""

    def __init__(self, env: simpy.Environment, durations: Durations) -> None:
        self._env, self._free_at = env, 0
        self._spent = defaultdict[int, deque[int]](deque)
        for each in durations.on_cpu:
            self._spent[each.y].append(each.spent)
        self._mean = _mean([each.spent for each in durations.on_cpu])

    def expert(self, layer: int, y: int, tokens: int, contended: bool, extra_ns: int = 0) -> Activity:
        """Return the measured duration of the expert, which is known when it starts."""
        own, began = self._spent[y], max(int(self._env.now), self._free_at)
        spent = own.popleft() if own else self._mean
        self._free_at = began + spent
        return Planned(self._env, CPU, Span(began, self._free_at, spent))


class NoProcessor:
    """Stub for machines without a CPU next to the accelerator; plans that need one are refused earlier."""

    def expert(self, layer: int, y: int, tokens: int, contended: bool, extra_ns: int = 0) -> Activity:
        """Raises AssertionError."""
        raise AssertionError("a live model has no CPU that computes misses")


def _mean(values: Sequence[int]) -> int:
    return sum(values) // len(values) if values else 0
