"""Compute, the process that waits: dense part, gate, experts, next step. Section 3 of `docs/semantics.md`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial

import simpy

from moereplay.policies.contract import RESIDENT
from moereplay.simulator.errors import LATEST_NS, too_late
from moereplay.simulator.interface import RunSpec
from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.counters import NO_EXPERT, Counters, EventLog
from moereplay.simulator.reference.cpu import CpuQueue
from moereplay.simulator.reference.gate import Access, Demanded, Gatekeeper, Served
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.machine import Activity, Machine, Span, Wakeup
from moereplay.simulator.reference.state import Batch, Tables, Transfer
from moereplay.simulator.source import Pass
from moereplay.traces.drafts import KNOWN

Process = Generator[simpy.Event, None, None]


class Compute:
    """Runs passes; the links respond in events."""

    def __init__(
        self,
        machine: Machine,
        spec: RunSpec,
        tables: Tables,
        cache: Cache,
        links: Links,
        gates: Gatekeeper,
        counters: Counters,
        log: EventLog,
    ) -> None:
        self._machine, self._config, self._layers = machine, spec.config, spec.layout.geometry.layers
        self._loads = machine.priced is not None and spec.times.has_loading
        self._loads_prefetches = self._loads and spec.times.loads_prefetches
        self._decision_ns, self._times = spec.decision_ns, spec.times
        self._draft_ns = 0  # of the pass in progress
        self._pieces = spec.times.has_pieces
        self._waits_for_all = spec.times.waits_for_all and spec.config.contract == "atomic"
        self._queues_together = self._waits_for_all or bool(machine.batches)
        self._stages = len(spec.times.matrices) if machine.batches and spec.times.has_stages else 0
        self._tables, self._cache, self._links, self._gates = tables, cache, links, gates
        self._counters, self._log = counters, log
        self._ready: deque[int] = deque()  # copies that arrived and wait for compute
        self._awaited: Wakeup | None = None
        self._cpu = CpuQueue(machine, spec, tables, links, counters, log, self._wake)
        links.report_to(self._arrived, self._moved, self._cpu.landed)
        self._suggests_late = gates.suggests_when_decided and spec.config.contract == "sequential"
        self._spent_ns = 0  # since the gate of the step in progress
        self._context = 0  # positions that the pass in progress looks back at

    def run(self, step_pass: Pass, clock: int, position: int, context: int) -> Process:
        """Run one pass, every layer, after `clock` tokens; its first row is at `position` of its request.

        It looks back at `context` positions.
        """
        began, self._context = self._now, context
        self._draft_ns = self._times.draft_ns(sum(row.draft != KNOWN for row in step_pass.rows))
        self._counters.begin_pass(began, step_pass)
        for layer in range(self._layers):
            self._begin_step(step_pass, layer, clock, position)
            yield from self._step(step_pass, layer)
        yield from self._head(step_pass)
        self._counters.end_pass(began, self._now, step_pass)

    def idle(self, until: int) -> Process:
        """Wait for the next request, in an event of compute; what happens meanwhile is charged to the pass before."""
        self._links.wake()
        yield self._machine.pause(until - self._now)

    def _begin_step(self, step_pass: Pass, layer: int, clock: int, position: int) -> None:
        """Set the execution point. Raises ConfigError if simulated time would overflow."""
        if self._now > LATEST_NS:
            raise too_late()
        self._tables.now.update(
            {"pass": step_pass.index, "layer": layer, "step": step_pass.index * self._layers + layer, "gated": 0},
            phase=step_pass.phase,
            tokens=step_pass.tokens,
            request=step_pass.request,
            clock=clock,
            position=position,
        )

    def _step(self, step_pass: Pass, layer: int) -> Process:
        yield self._begun(self._dense(layer, step_pass.tokens), "dense_ns", layer, "dense")
        gated, self._spent_ns = self._now, 0
        demanded = self._gates.open(step_pass, layer)
        sequential = self._config.contract == "sequential"
        yield from (self._one_by_one if sequential else self._together)(demanded, step_pass, layer)
        if self._config.prefetch_at == "after_demand" or self._suggests_late:
            yield from self._load(self._suggest(demanded), layer)
        self._gates.settle(demanded, step_pass, layer)
        self._links.take_batches()  # none is left where compute takes them
        self._counters.count("stall_ns", layer, self._now - gated - self._spent_ns)
        self._cache.end_step()

    def _head(self, step_pass: Pass) -> Process:
        """Run the head, counted with the dense part of layer 0, which includes it on the simulated machine."""
        if self._machine.head is not None:
            yield self._begun(self._machine.head(step_pass.tokens), "dense_ns", 0, "head")

    # contract atomic

    def _together(self, demanded: Demanded, step_pass: Pass, layer: int) -> Process:
        """Look up everything at the gate; hits run in demand order, then arrivals in the order of landing."""
        accesses = self._gates.look_up(demanded, range(len(demanded.step.expert)))
        accesses = self._gates.union_again(demanded, accesses, step_pass)
        self._cpu.bring(accesses)
        to_load = self._to_load(self._gates.use(demanded, accesses), self._loads)
        suggests, prefetches = self._config.prefetch_at == "gate", list[Transfer]()
        if suggests and not to_load:
            prefetches = self._suggest(demanded)
        self._cpu.start(accesses)
        self._links.wake()
        if to_load:
            yield from self._load(to_load, layer)
            if suggests:
                prefetches = self._suggest(demanded)
            self._links.wake()
        if prefetches:
            yield from self._load(prefetches, layer)
            self._links.wake()
        yield from self._run_together(accesses, layer)
        yield from self._until(lambda: not self._cpu.works)

    def _run_together(self, accesses: list[Access], layer: int) -> Process:
        if self._stages:
            return self._in_rounds(accesses, layer)
        return (self._all_together if self._waits_for_all else self._as_they_come)(accesses, layer)

    def _as_they_come(self, accesses: list[Access], layer: int) -> Process:
        for access in accesses:
            if access.served is Served.HIT:
                yield from self._run_expert(access, layer)
        coming = {access.y: access for access in accesses if access.served.waits}
        while coming:
            yield from self._until(lambda: bool(self._ready))
            yield from self._run_expert(coming.pop(self._ready.popleft()), layer)

    def _all_together(self, accesses: list[Access], layer: int) -> Process:
        """Run in demand order once all copies are resident, or once no link moves if not all fit."""
        left = [access for access in accesses if access.served.runs_here]
        while left:
            coming = sum(access.served.waits for access in left)
            yield from self._until(partial(self._all_here, coming, coming == len(left)))
            here = set(self._ready)
            self._ready.clear()
            runs = [access for access in left if not access.served.waits or access.y in here]
            for access in runs:
                yield from self._run_expert(access, layer)
            left = [access for access in left if access not in runs]
            if left:
                self._links.wake()

    def _all_here(self, due: int, nothing_else: bool) -> bool:
        """Return True if all `due` have arrived, or none can before a resident expert is computed."""
        stuck = not self._links.moving and (self._ready or not nothing_else)
        return len(self._ready) == due or bool(stuck)

    # links that read matrix by matrix

    def _in_rounds(self, accesses: list[Access], layer: int) -> Process:
        """Compute the available experts, with the batches that have started, round by round."""
        left = [access for access in accesses if access.served.runs_here]
        while left:
            yield from self._until(partial(self._round_is_due, left))
            fetches = any(access.served is Served.FETCH for access in left)
            batches = self._links.take_batches() if fetches else []  # a substitute leaves the batch to its expert
            reading = {transfer.y for batch in batches for transfer in batch.transfers}
            runs = [access for access in left if access.served is not Served.FETCH or access.y in reading]
            yield from self._run_round(runs, batches, layer)
            left = [access for access in left if access not in runs]
            if left:
                self._links.wake()

    def _round_is_due(self, left: list[Access]) -> bool:
        """Return True if every link that has demands has started a batch, or none can before a round has run."""
        if all(access.served is not Served.FETCH for access in left):
            return True
        there = self._links.any_started or any(access.served is not Served.FETCH for access in left)
        return there and (self._links.all_started or not self._links.moving)

    def _run_round(self, runs: list[Access], batches: list[Batch], layer: int) -> Process:
        """Run experts in one stage per matrix, each as soon as this matrix of all of them has landed."""
        assert self._machine.priced is not None
        late = [access for access in runs if access.served is Served.LATE and not self._is_here(access)]
        work = [(access.y, access.tokens) for access in runs]
        for matrix in range(1, self._stages + 1) if batches or late else (0,):
            yield from self._until(partial(self._has_landed, matrix, batches, late))
            stage = self._machine.priced.stage(layer, work, self._links.busy, matrix)
            yield self._begun(stage, "expert_ns", layer, "stage")
        for access in runs:
            self._cache.learn(access.x, needed=0)
            self._cache.computed(access.y)

    def _has_landed(self, matrix: int, batches: list[Batch], late: list[Access]) -> bool:
        return all(batch.landed >= matrix for batch in batches) and all(map(self._is_here, late))

    def _is_here(self, access: Access) -> bool:
        return self._tables.copies[access.y]["state"] == RESIDENT

    # contract sequential

    def _one_by_one(self, demanded: Demanded, step_pass: Pass, layer: int) -> Process:
        """Look up each expert in its turn and pin only this one: Algorithm 1 of SpecMD."""
        at_gate = self._config.prefetch_at == "gate" and not self._suggests_late
        prefetches = self._suggest(demanded) if at_gate else []
        for n in range(len(demanded.step.expert)):
            accesses = self._gates.look_up(demanded, [n])
            accesses += self._gates.substitutes(accesses[0])
            self._cpu.bring(accesses)
            to_load = self._to_load(self._gates.use(demanded, accesses), self._loads)
            self._cpu.start(accesses)
            yield from self._load(to_load, layer)
            yield from self._load(prefetches if n == 0 else [], layer)
            # substitutes first: they need not wait, and may have to leave before the expert is fetched for other tokens
            for access in sorted(accesses, key=lambda access: access.served is not Served.HIT):
                if self._stages:
                    yield from self._in_rounds([access], layer)
                elif access.served.waits:
                    yield from self._until(lambda: bool(self._ready))
                    self._ready.popleft()
                if access.served.runs_here:
                    if not self._stages:
                        yield from self._run_expert(access, layer)
                    self._cache.release(access.y)
            yield from self._until(lambda: not self._cpu.works)
        if not demanded.step.expert:
            yield from self._load(prefetches, layer)

    # activities

    def _dense(self, layer: int, tokens: int) -> Activity:
        if self._machine.priced is None:
            return self._machine.accelerator.dense(layer, tokens)
        decided = self._decision_ns(layer, tokens) + (self._draft_ns if layer == 0 else 0)
        return self._machine.priced.dense(layer, tokens, self._context, self._links.busy, decided)

    def _expert(self, layer: int, access: Access) -> Activity:
        if self._machine.priced is None:
            return self._machine.accelerator.expert(layer, access.y, access.tokens)
        lands = self._links.lands(access.y) if self._pieces else 0
        return self._machine.priced.expert(layer, access.y, access.tokens, self._links.busy, lands)

    def _to_load(self, announced: list[Transfer], loads: bool) -> list[Transfer]:
        """Return the transfers that compute has to load; the others are queued at once."""
        if loads:
            return announced
        for transfer in announced:
            self._links.queue(transfer)
        return []

    def _load(self, transfers: list[Transfer], layer: int) -> Process:
        """Spend compute's own time on loading; each transfer is queued at its end, or all demands after the last."""
        waiting = list[Transfer]()
        for transfer in transfers:
            assert self._machine.priced is not None  # or nothing is to be loaded
            load = self._machine.priced.load(transfer.y)
            yield self._begun(load, "loading_ns", layer, "load", transfer.y, transfer.cause)
            if self._queues_together and not transfer.prefetch:
                waiting.append(transfer)
            else:
                self._links.queue(transfer)
        for transfer in waiting:
            self._links.queue(transfer)

    def _suggest(self, demanded: Demanded) -> list[Transfer]:
        """Call the prefetch policy. Return the prefetches that compute has to load."""
        return self._to_load(self._gates.suggest(demanded), self._loads_prefetches)

    def _run_expert(self, access: Access, layer: int) -> Process:
        """Run one expert over its tokens."""
        yield self._begun(self._expert(layer, access), "expert_ns", layer, "expert", access.y)
        self._cache.learn(access.x, needed=0)
        self._cache.computed(access.y)

    def _add_to_step(self, span: Span) -> None:
        self._spent_ns += span.spent

    def _begun(
        self, activity: Activity, counter: str, layer: int, kind: str, y: int = NO_EXPERT, cause: str = "compute"
    ) -> Activity:
        """Charge and log compute's next activity at its start, and wake the links."""
        self._counters.charge(activity, counter, layer)
        activity.measured(self._add_to_step)
        self._log.begin(kind, y, activity, cause)
        self._links.wake()
        return activity

    def _until(self, holds: Callable[[], bool]) -> Process:
        """Wait until a condition holds; arrivals and the CPU wake it."""
        while not holds():
            self._links.wake()
            self._awaited = Wakeup(self._machine.env)
            yield self._awaited

    def _wake(self) -> None:
        """Resume blocked compute as a COMPUTE event of this time."""
        if self._awaited is not None:
            self._awaited.ring()
            self._awaited = None

    def _arrived(self, transfer: Transfer) -> None:
        """Handle the arrival of a transfer or its first piece: resume compute if a demand waits for it."""
        if not self._stages and not transfer.unused and not transfer.arrival_known:
            transfer.arrival_known = True
            self._ready.append(transfer.y)
            self._wake()

    def _moved(self) -> None:
        """Handle a link event: compute that waits for more than one arrival checks whether it may go on."""
        if self._waits_for_all or self._stages:
            self._wake()

    @property
    def _now(self) -> int:
        return int(self._machine.env.now)
