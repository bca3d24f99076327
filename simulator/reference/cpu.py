"""The CPU's share of a step: misses that it computes from the tier that it reads, beside links and compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from moereplay.simulator.interface import RunSpec
from moereplay.simulator.reference.counters import Counters, EventLog
from moereplay.simulator.reference.gate import Access, Served
from moereplay.simulator.reference.links import Links
from moereplay.simulator.reference.machine import Machine
from moereplay.simulator.reference.state import Tables, Transfer

NO_STEP = -1


class CpuQueue:
    """One expert at a time, first queued first served; what is not there has to come first."""

    def __init__(
        self,
        machine: Machine,
        spec: RunSpec,
        tables: Tables,
        links: Links,
        counters: Counters,
        log: EventLog,
        done: Callable[[], None],
    ) -> None:
        """`done` is called when the CPU has computed all of a look-up."""
        self._cpu, self._now, self._links, self._counters, self._log = machine.cpu, tables.now, links, counters, log
        self._has_tier, self._done = spec.times.cpu_tier >= 0, done
        self._sync_ns, self._synced = spec.times.sync_ns if machine.priced else 0, NO_STEP
        self._left = 0  # experts that it has not computed, those among them that have to come first
        self._begun = 0  # of these, what the processor was handed
        self._coming: dict[int, Access] = {}  # copy -> what waits for its landing
        self._landed: deque[Access] = deque()  # waits for the processor

    @property
    def works(self) -> bool:
        """True if an expert of the step is queued, being computed, or has to come first."""
        return self._left > 0

    def bring(self, accesses: Sequence[Access]) -> None:
        """Hold what is where the CPU reads; queue the rest to come."""
        for access in accesses:
            if access.served is not Served.CPU:
                continue
            layer, step = self._now["layer"], self._now["step"]
            transfer = Transfer(access.y, layer, prefetch=False, target_step=step, for_cpu=True)
            if not self._links.read_by_cpu(transfer):
                self._counters.count("cpu_absent", layer)
                self._coming[access.y] = access

    def start(self, accesses: Sequence[Access]) -> None:
        """Begin with what is there, judged once for contention; times are known at once."""
        contended = self._links.busy
        chosen = [access for access in accesses if access.served is Served.CPU]
        here = [access for access in chosen if access.y not in self._coming]
        self._left = len(chosen)
        self._links.beside_cpu(bool(here))
        for access in here:
            self._begin(access, contended, self._sync_ns if self._synced != self._now["step"] else 0)
            self._synced = self._now["step"]

    def landed(self, transfer: Transfer) -> None:
        """Queue the work on a copy that has come."""
        self._landed.append(self._coming.pop(transfer.y))
        self._links.beside_cpu(True)
        self._go_on()

    def _go_on(self) -> None:
        if self._landed and not self._begun:
            self._begin(self._landed.popleft(), self._links.busy)

    def _begin(self, access: Access, contended: bool, extra_ns: int = 0) -> None:
        layer = self._now["layer"]
        activity = self._cpu.expert(layer, access.y, access.tokens, contended, extra_ns)
        self._begun += 1
        self._log.begin("cpu", access.y, activity, "miss")
        self._counters.charge(activity, "cpu_ns", layer)
        activity.then(partial(self._computed, access.y))

    def _computed(self, y: int) -> None:
        """Let the copy go, begin the next, and wake links and compute."""
        self._left -= 1
        self._begun -= 1
        self._links.computed_by_cpu(y)
        self._go_on()
        if not self._begun:
            self._links.beside_cpu(False)
        if self._has_tier:
            self._links.wake()
        if not self._left:
            self._done()
