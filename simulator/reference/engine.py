"""The reference engine: `run` a source of demand, or drive a run pass by pass from a live model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import simpy

from moereplay.policies.contract import RESIDENT, PolicyError
from moereplay.simulator.arrivals import Arriving
from moereplay.simulator.config import FUTURE, parse_reset
from moereplay.simulator.interface import EndState, FinishedRun, RunSpec, oracle_of
from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.compute import Compute, Process
from moereplay.simulator.reference.counters import NO_EXPERT, Counters, EventLog
from moereplay.simulator.reference.gate import Gatekeeper
from moereplay.simulator.reference.hooks import BoundHooks
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.machine import Machine, Wakeup, simulated
from moereplay.simulator.reference.state import NullPlacement, Placement, Tables
from moereplay.simulator.source import Gates, Idle, InOrder, Pass, Scheduler, Source
from moereplay.traces.passes import slots_of


def run(
    source: Source, spec: RunSpec, machine: Machine | None = None, placement: Placement | None = None
) -> FinishedRun:
    """Replay the source on `machine`, by default the simulated one of the platform of `spec`.

    `placement` follows where copies lie. Raises PolicyError, and the error of a failed activity.
    """
    return run_scheduled(source, spec, scheduler_of(source, spec), machine, placement)


def scheduler_of(source: Source, spec: RunSpec) -> Scheduler:
    """Return the source's own schedule, or with arrivals its passes as the shares of its requests."""
    if not spec.arrivals:
        return InOrder(source)
    slots = slots_of(spec.config.passes)
    assert slots is not None  # checked when the run was planned
    return Arriving(source.passes(), spec.arrivals, slots)


def run_scheduled(
    gates: Gates,
    spec: RunSpec,
    scheduler: Scheduler,
    machine: Machine | None = None,
    placement: Placement | None = None,
) -> FinishedRun:
    """Run passes that are decided one at a time. Raises PolicyError for a policy that needs the future."""
    _check_future(gates, spec)
    return _finished(Engine(gates, spec, machine, placement), scheduler).close()


def _check_future(gates: Gates, spec: RunSpec) -> None:
    for each in spec.chosen.all:
        if not gates.first_uses() and FUTURE in each.needs:
            raise PolicyError(
                f"{each.policy.kind} {each.text()} needs the future, which depends on passes to come; choose a policy "
                "without it"
            )


def run_with_state(source: Source, spec: RunSpec) -> EndState:
    """Replay the source and return the state at the end as well."""
    engine = _finished(Engine(source, spec), scheduler_of(source, spec))
    return EndState(engine.close(), *engine.state())


def _finished(engine: Engine, scheduler: Scheduler) -> Engine:
    engine.env.process(engine.replay(scheduler))
    engine.env.run(until=engine.finished)
    return engine


class Engine:
    """One run: its connected parts, and the work between passes."""

    def __init__(
        self, source: Gates, spec: RunSpec, machine: Machine | None = None, placement: Placement | None = None
    ) -> None:
        """Connect the parts. The platform of `spec` prices policies on any machine."""
        config, chosen = spec.config, spec.chosen.priced(spec.times)
        machine = machine or simulated(spec.times, spec.layout.precisions)
        self.env = machine.env
        self.finished = Wakeup(self.env)
        self._config, self._start = config, (spec.warm, spec.warm_lower)
        self._counters = Counters(spec.layout.geometry.layers, spec.arrivals, spec.by_layer)
        self._tables = Tables(spec.layout, spec.pool_of, oracle_of(source, config, chosen.eviction), config.seed)
        self._log = EventLog(self.env, self._tables, spec.log)
        self._hooks = BoundHooks(chosen, self._tables, spec.pools)
        side = chosen.prefetch.policy.side_slots(chosen.prefetch.params)
        free_only = config.prefetch_admission == "free_only"
        shared = self._counters, self._log
        where = placement or NullPlacement()
        self._cache = Cache(spec.layout, self._tables, self._hooks, *shared, where, side, free_only, spec.resident)
        self._links = Links(machine.links, spec.times, spec.lower, self._cache, *shared, machine.batches)
        self._gates = Gatekeeper(source, self._tables, self._hooks, self._cache, self._links, *shared)
        self._compute = Compute(machine, spec, self._tables, self._cache, self._links, self._gates, *shared)
        self._previous = set[int]()  # requests of the pass before
        self._passes = self._tokens = self._tokens_since_reset = 0  # that have been run
        self._began: dict[int, int] = {}  # request -> its first token

    def replay(self, scheduler: Scheduler) -> Process:
        """Run passes until the scheduler returns no rows."""
        self.warm_up()
        while rows := scheduler.next_rows(int(self.env.now)):
            if isinstance(rows, Idle):
                yield from self._compute.idle(rows.until)
            else:
                yield from self.forward(Pass(self._passes, rows))
        self._links.close()
        self.finished.ring()

    def forward(self, step_pass: Pass) -> Process:
        """Run one pass, after a reset if one is due."""
        requests = {row.request for row in step_pass.rows}
        if self._reset_due(requests):
            self._reset()
        for row in step_pass.rows:
            self._began.setdefault(row.request, row.token)
        position = step_pass.start - self._began[step_pass.request]
        yield from self._compute.run(step_pass, self._tokens, position, self._context(step_pass))
        self._previous = requests
        self._passes += 1
        self._tokens += step_pass.tokens
        self._tokens_since_reset += step_pass.tokens

    def _context(self, step_pass: Pass) -> int:
        """Return the positions that a pass looks back at, over its requests, each up to its last row."""
        last = dict[int, int]()
        for row in step_pass.rows:
            last[row.request] = max(last.get(row.request, 0), row.token - self._began[row.request] + 1)
        return sum(last.values())

    def warm_up(self) -> None:
        """Make warm copies resident before the first pass."""
        fast, lower = self._start
        for y in fast:
            self._cache.warm(y)
        self._links.warm(lower)

    def _reset_due(self, requests: set[int]) -> bool:
        """Return True if a reset precedes this pass; `request`: if it shares no request with the previous pass."""
        every = parse_reset(self._config.reset)
        if self._passes == 0 or every == 0:
            return False
        return not requests & self._previous if every < 0 else self._tokens_since_reset >= every

    def _reset(self) -> None:
        """Clear residency, policy memory, history and queues; abandon transfers in flight."""
        self._tokens_since_reset = 0
        self._log.note("reset", NO_EXPERT, self._config.reset)
        self._tables.clear()
        self._hooks.clear()
        self._cache.clear()
        self._links.clear()
        self._gates.clear()

    def close(self) -> FinishedRun:
        """End the run with its last step and count prefetched copies that were never used.

        Transfers in flight are abandoned; those whose duration is only known at their end are awaited.
        """
        ended = int(self.env.now)
        self._links.clear()
        while self._links.unmeasured:
            self.env.step()
        for layer, size in self._cache.unused_bytes():
            self._counters.count("bytes_unused_at_end", layer, size)
        return FinishedRun(self._counters, ended, self._log.events)

    def state(self) -> tuple[list[int], list[Sequence[Any]]]:
        """Return the resident copies and the memories of the four policies, as in `EndState`."""
        residents = [y for y, copy in enumerate(self._tables.copies) if copy["state"] == RESIDENT]
        return residents, [(own.rows, own.regs, own.reals) for own in self._hooks.memories]


# driven from outside


class Driven:
    """A run whose passes are known one at a time; a live forward pass cannot wait inside an engine, so it steps it.

    `begin` a pass, `advance` at each of its gates, `close` at the end. The events are those of `run`: a pass begins in
    the event in which the previous pass ended.
    """

    def __init__(
        self, source: Gates, spec: RunSpec, machine: Machine | None = None, placement: Placement | None = None
    ) -> None:
        self._engine = Engine(source, spec, machine, placement)
        self._engine.warm_up()
        self._process: simpy.Process | None = None

    def begin(self, step_pass: Pass) -> None:
        """Begin the next pass."""
        self._process = self._engine.env.process(self._engine.forward(step_pass))

    def advance(self, done: Callable[[], bool]) -> None:
        """Run events until `done()` holds. Raises the error of a policy."""
        while not done():
            self._engine.env.step()
        failure = self._process.value if self._process is not None and self._process.triggered else None
        if isinstance(failure, BaseException):
            raise failure

    @property
    def waits_for_a_pass(self) -> bool:
        """True if the last pass has ended."""
        return self._process is None or self._process.triggered

    def close(self) -> FinishedRun:
        """End the run with its last step; transfers in flight are abandoned."""
        return self._engine.close()
