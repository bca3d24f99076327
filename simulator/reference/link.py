"""The link between the tiers: a queue, demand ahead of prefetch, transfers first in first out and never interrupted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import simpy

from simulator.platform import Times
from simulator.reference.event_log import EventLog
from simulator.reference.events import LINK, At
from simulator.reference.jobs import Claim, Job
from simulator.reference.ledger import Ledger
from simulator.reference.tier import Tier


class Link:
    """Up to `depth` transfers are issued at once; bytes are claimed when a transfer starts."""

    def __init__(
        self,
        env: simpy.Environment,
        tier: Tier,
        times: Times,
        ledger: Ledger,
        log: EventLog,
        arrived: Callable[[Job], None],
    ) -> None:
        self._env, self._tier, self._times = env, tier, times
        self._ledger, self._log, self._arrived = ledger, log, arrived
        self._precisions = tier.tables.now["precisions"]
        self._epoch = 0
        self.clear()

    def clear(self) -> None:
        """Forget the queue, abandon what is in flight; the link is free at once."""
        self._epoch += 1
        self._demands: deque[Job] = deque()
        self._prefetches: deque[Job] = deque()
        self._in_flight: list[Job] = []
        self._last_done = 0
        self.beside_cpu = False  #: the CPU computes now, and may take from this link's rate

    @property
    def busy(self) -> bool:
        """Whether something is on its way, or a demand is about to be."""
        return bool(self._in_flight or self._demands)

    def fetch(self, job: Job) -> None:
        """Queue a demand, behind other demands and ahead of all prefetches."""
        self._tier.queue(job.y)
        self._demands.append(job)

    def prefetch(self, job: Job) -> None:
        """Queue a prefetch, behind older ones."""
        self._tier.queue(job.y)
        self._prefetches.append(job)
        self._ledger.count("prefetch_issued", job.layer)

    def in_flight(self, y: int) -> Job:
        """The transfer that is bringing y."""
        return next(job for job in self._in_flight if job.y == y)

    def cancel(self, step: int) -> None:
        """Drop every queued prefetch aimed at this step or an earlier one."""
        overtaken = [job for job in self._prefetches if job.target_step <= step]
        self._prefetches = deque(job for job in self._prefetches if job.target_step > step)
        for job in overtaken:
            self._tier.forget(job.y)
            self._note(job, "prefetch_cancelled", "cancel")

    def renew(self) -> None:
        """Drop every queued prefetch: the policy names anew."""
        self.cancel(self._tier.tables.now["step"] + self._tier.tables.now["layers"])

    def wake(self) -> None:
        """Start whatever can start now."""
        while len(self._in_flight) < self._times.depth and self._start_one():
            pass

    def _start_one(self) -> bool:
        if self._demands:
            return self._start_demand()
        while self._prefetches:
            job = self._prefetches.popleft()
            if self._tier.claim(job) is Claim.GRANTED:
                self._ledger.count("prefetch_started", job.layer)
                self._begin(job)
                return True
            self._tier.forget(job.y)
            self._note(job, "prefetch_dropped", "drop")
        return False

    def _start_demand(self) -> bool:
        """The head, or nobody: a demand that finds no room holds the link."""
        if self._tier.claim(self._demands[0]) is Claim.REFUSED:
            return False
        self._begin(self._demands.popleft())
        return True

    def _begin(self, job: Job) -> None:
        now, precision = int(self._env.now), job.y % self._precisions
        free = max(now + self._times.latency_ns, self._last_done)
        begins = max(now, self._last_done)
        wire_ns = self._times.contended_wire_ns if self.beside_cpu else self._times.wire_ns
        self._last_done = free + wire_ns[job.layer][precision]
        self._in_flight.append(job)
        size = self._tier.tables.copies[job.y]["bytes"]
        self._ledger.count("bytes_prefetch" if job.prefetch else "bytes_demand", job.layer, size)
        self._ledger.count("link_busy_ns", job.layer, self._last_done - begins)
        self._log.begin("transfer", job.y, self._last_done - now, job.cause)
        epoch = self._epoch
        done = At(self._env, LINK, self._last_done - now)
        done.callbacks.append(lambda _: self._complete(job, epoch))

    def _complete(self, job: Job, epoch: int) -> None:
        """One LINK event: resident, next transfer started, compute woken."""
        if epoch != self._epoch:  # abandoned by a reset
            return
        self._in_flight.remove(job)
        self._tier.land(job)
        self.wake()
        self._arrived(job)

    def _note(self, job: Job, counter: str, kind: str) -> None:
        self._ledger.count(counter, job.layer)
        self._log.note(kind, job.y, job.cause)
