"""Compute's story: dense part, gate, experts, next step. The specification of `semantics`, section 3."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import simpy

from policies.contract import RESIDENT
from simulator.config import parse_reset
from simulator.foreknown import known_of
from simulator.reference.event_log import NO_EXPERT, EventLog
from simulator.reference.events import COMPUTE, At, Bell
from simulator.reference.events import CPU as CPU_PHASE
from simulator.reference.gate import Access, Demanded, Gatekeeper, Served
from simulator.reference.hooks import BoundHooks
from simulator.reference.jobs import Job
from simulator.reference.ledger import Ledger
from simulator.reference.link import Link
from simulator.reference.tables import Tables
from simulator.reference.tier import Tier
from simulator.setting import EndState, Ran, Setting
from simulator.source import Gates, Pass, Source

Story = Generator[simpy.Event, None, None]


def run(source: Source, setting: Setting) -> Ran:
    """Replay the source."""
    return _finished(source, setting).close_books()


def run_with_state(source: Source, setting: Setting) -> EndState:
    """The same, with the state at the end."""
    engine = _finished(source, setting)
    return EndState(engine.close_books(), *engine.state())


def _finished(source: Source, setting: Setting) -> Engine:
    engine = Engine(source, setting)
    engine.env.process(engine.compute(source.passes()))
    engine.env.run(until=engine.finished)
    return engine


class Engine:
    """One run. `compute` is the only process that waits; the link answers in events."""

    def __init__(self, source: Gates, setting: Setting) -> None:
        config, chosen = setting.config, setting.config.policy_set().priced(setting.times)
        self.env = simpy.Environment()
        self.finished = self.env.event()
        self._config, self._times, self._shape = config, setting.times, setting.shape
        self.ledger = Ledger(setting.shape.geometry.layers)
        self._tables = Tables(setting.shape, setting.pools, known_of(source, config, chosen.eviction), config.seed)
        self.log = EventLog(self.env, self._tables, setting.log)
        self._hooks = BoundHooks(chosen, self._tables, setting.pools)
        side = chosen.prefetch.policy.side_slots(chosen.prefetch.params)
        free_only = config.prefetch_admission == "free_only"
        self._tier = Tier(setting.shape, self._tables, self._hooks, self.ledger, self.log, side, free_only)
        self._link = Link(self.env, self._tier, self._times, self.ledger, self.log, self._arrived)
        self._gates = Gatekeeper(source, self._tables, self._hooks, self._tier, self._link, self.ledger, self.log)
        self._ready: deque[int] = deque()  # copies that arrived and wait for compute
        self._awaited: Bell | None = None
        self._cpu_busy = False
        self._expert_ns = 0  # of the step in progress
        self._previous: Pass | None = None
        self._tokens_since_reset = 0
        self._request_began = 0  # token at which the request in progress begins

    # passes and steps

    def compute(self, passes: Iterable[Pass]) -> Story:
        """Every pass."""
        self.warm_up()
        for step_pass in passes:
            yield from self.forward(step_pass)
        self.finished.succeed()

    def forward(self, step_pass: Pass) -> Story:
        """One pass, every layer, after the reset that may be due."""
        if self._reset_due(step_pass):
            self._reset()
        if self._previous is None or step_pass.request != self._previous.request:
            self._request_began = step_pass.start
        self._previous = step_pass
        self._tokens_since_reset += step_pass.tokens
        began = self._now
        self.ledger.begin_pass(began, step_pass.request, step_pass.phase, step_pass.tokens)
        for layer in range(self._shape.geometry.layers):
            self._begin_step(step_pass, layer)
            yield from self._step(step_pass, layer)
        self.ledger.end_pass(began, self._now)

    def _begin_step(self, step_pass: Pass, layer: int) -> None:
        layers = self._shape.geometry.layers
        self._tables.now.update(
            {"pass": step_pass.index, "layer": layer, "step": step_pass.index * layers + layer, "gated": 0},
            phase=step_pass.phase,
            tokens=step_pass.tokens,
            request=step_pass.request,
            clock=step_pass.start,
            position=step_pass.start - self._request_began,
        )

    def _step(self, step_pass: Pass, layer: int) -> Story:
        dense = self._times.dense_ns(layer, step_pass.tokens)
        dense += self._times.pass_ns(step_pass.tokens) if layer == 0 else 0
        self.ledger.count("dense_ns", layer, dense)
        yield self._busy(dense, "dense", NO_EXPERT)
        gated, self._expert_ns = self._now, 0
        demanded = self._gates.open(step_pass, layer)
        sequential = self._config.contract == "sequential"
        yield from (self._one_by_one if sequential else self._together)(demanded, step_pass, layer)
        if self._config.prefetch_at == "after_demand":
            self._gates.suggest(demanded)
        self._gates.settle(demanded, step_pass, layer)
        self.ledger.count("stall_ns", layer, self._now - gated - self._expert_ns)
        self._tier.end_step()

    # contract atomic

    def _together(self, demanded: Demanded, step_pass: Pass, layer: int) -> Story:
        """Everything is looked up at the gate; hits run in demand order, then arrivals as they come."""
        accesses = self._gates.look_up(demanded, range(len(demanded.step.expert)))
        accesses = self._gates.reunite(demanded, accesses, step_pass)
        self._gates.use(demanded, accesses)
        if self._config.prefetch_at == "gate":
            self._gates.suggest(demanded)
        self._start_cpu([access for access in accesses if access.served is Served.CPU], layer)
        self._link.wake()
        for access in accesses:
            if access.served is Served.HIT:
                yield from self._run(access, layer)
        coming = {access.y: access for access in accesses if access.served.waits}
        while coming:
            yield from self._until(lambda: bool(self._ready))
            yield from self._run(coming.pop(self._ready.popleft()), layer)
        yield from self._until(lambda: not self._cpu_busy)

    # contract sequential

    def _one_by_one(self, demanded: Demanded, step_pass: Pass, layer: int) -> Story:
        """Algorithm 1 of SpecMD: each expert is looked up when its turn comes, and only it is protected."""
        if self._config.prefetch_at == "gate":
            self._gates.suggest(demanded)
        for n in range(len(demanded.step.expert)):
            accesses = self._gates.look_up(demanded, [n])
            accesses += self._gates.stand_ins(accesses[0])
            self._gates.use(demanded, accesses)
            self._start_cpu([access for access in accesses if access.served is Served.CPU], layer)
            # stand-ins first, as they need not wait and may have to make room for what they did not replace
            for access in sorted(accesses, key=lambda access: access.served is not Served.HIT):
                if access.served.waits:
                    yield from self._until(lambda: bool(self._ready))
                    self._ready.popleft()
                if access.served.runs_here:
                    yield from self._run(access, layer)
                    self._tier.release(access.y)
            yield from self._until(lambda: not self._cpu_busy)

    # activities

    def _run(self, access: Access, layer: int) -> Story:
        """One expert over its tokens."""
        spent = self._times.expert_ns(layer, access.y % self._shape.precisions, access.tokens)
        self._expert_ns += spent
        self.ledger.count("expert_ns", layer, spent)
        yield self._busy(spent, "expert", access.y)
        self._tier.learn(access.x, needed=0)
        self._tier.computed(access.y)

    def _busy(self, spent: int, kind: str, y: int) -> simpy.Event:
        """Compute's next activity; the link is woken once it has been chosen."""
        self.log.begin(kind, y, spent, "compute")
        done = At(self.env, COMPUTE, spent)
        self._link.wake()
        return done

    def _until(self, holds: Callable[[], bool]) -> Story:
        """Wait, woken by arrivals and by the CPU."""
        while not holds():
            self._link.wake()
            self._awaited = Bell(self.env)
            yield self._awaited

    def _wake(self) -> None:
        """Compute goes on as a COMPUTE event of this time, if it waits."""
        if self._awaited is not None:
            self._awaited.ring()
            self._awaited = None

    def _arrived(self, job: Job) -> None:
        if not job.unused:
            self._ready.append(job.y)
            self._wake()

    def _start_cpu(self, accesses: list[Access], layer: int) -> None:
        """The CPU takes its share one after the other, beside link and compute; slower if the link works too."""
        at, contended = 0, self._link.busy
        for access in accesses:
            spent = self._times.cpu_ns(layer, access.y % self._shape.precisions, access.tokens, contended)
            self.log.begin("cpu", access.y, spent, "miss", after=at)
            at += spent
        self._cpu_busy = self._link.beside_cpu = bool(accesses)
        if accesses:
            At(self.env, CPU_PHASE, at).callbacks.append(self._cpu_done)

    def _cpu_done(self, _: simpy.Event) -> None:
        self._cpu_busy = self._link.beside_cpu = False
        self._wake()

    # start, reset, end

    def warm_up(self) -> None:
        """What is resident before the first pass."""
        geometry = self._shape.geometry
        for layer, expert in self._config.warm:
            self._tier.warm((layer * geometry.experts + expert) * self._shape.precisions)

    def _reset_due(self, step_pass: Pass) -> bool:
        every, previous = parse_reset(self._config.reset), self._previous
        if previous is None or every == 0:
            return False
        return step_pass.request != previous.request if every < 0 else self._tokens_since_reset >= every

    def _reset(self) -> None:
        """Residency, policy state, history and queue are cleared; what is in flight is abandoned."""
        self._tokens_since_reset = 0
        self.log.note("reset", NO_EXPERT, self._config.reset)
        self._tables.clear()
        self._hooks.clear()
        self._tier.clear()
        self._link.clear()

    def close_books(self) -> Ran:
        """The run is over: count what was prefetched and never used."""
        for layer, size in self._tier.unused_bytes():
            self.ledger.count("bytes_unused_at_end", layer, size)
        return Ran(self.ledger, self._now, self.log.events)

    def state(self) -> tuple[list[int], list[Sequence[Any]]]:
        """The copies that are resident, and the memories of the four policies, as `EndState` has them."""
        residents = [y for y, copy in enumerate(self._tables.copies) if copy["state"] == RESIDENT]
        return residents, [(own.rows, own.regs, own.reals) for own in self._hooks.memories]

    @property
    def _now(self) -> int:
        return int(self.env.now)
