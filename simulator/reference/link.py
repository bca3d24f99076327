"""A link between two tiers: a queue, demand ahead of prefetch, transfers first in first out and never interrupted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.clock import Span
from moereplay.simulator.reference.counters import Counters
from moereplay.simulator.reference.log import EventLog
from moereplay.simulator.reference.lower_tiers import Below, LowerTier
from moereplay.simulator.reference.machine import Channel
from moereplay.simulator.reference.transfers import Claim, Transfer


class Link:
    """Up to `depth` transfers are issued at once; bytes are claimed when a transfer starts."""

    def __init__(
        self,
        channel: Channel,
        cache: Cache,
        counters: Counters,
        log: EventLog,
        below: Below,
        into: LowerTier | None,
        landed: Callable[[Transfer], None],
    ) -> None:
        """It reads the tier `below` and fills `into`, or else the cache; `landed` is told after what was filled."""
        self._channel, self._cache, self._below, self._into = channel, cache, below, into or cache
        self._counters, self._log, self._landed = counters, log, landed
        self._epoch = self._unmeasured = 0
        self._closed = False
        self._empty()

    def clear(self) -> None:
        """Forget the queue, abandon what is in flight; the link is free at once."""
        self._epoch += 1
        self._channel.abandon()
        self._empty()

    def close(self) -> None:
        """What is issued from here on does not land any more."""
        self._closed = True

    def _empty(self) -> None:
        self._demands: deque[Transfer] = deque()
        self._prefetches: deque[Transfer] = deque()
        self._in_flight: list[Transfer] = []
        self.beside_cpu = False  #: the CPU computes now, and may take from this link's rate

    @property
    def unmeasured(self) -> bool:
        """Whether a transfer, perhaps an abandoned one, is under way of which nobody knows how long it takes."""
        return self._unmeasured > 0

    @property
    def busy(self) -> bool:
        """Whether something is in flight, or a demand is queued."""
        return bool(self._in_flight or self._demands)

    @property
    def moving(self) -> bool:
        """Whether something is in flight."""
        return bool(self._in_flight)

    def add(self, transfer: Transfer) -> None:
        """Queue a transfer: a demand behind other demands and ahead of all prefetches, a prefetch behind older ones."""
        self._below.hold(transfer.y)
        (self._prefetches if transfer.prefetch else self._demands).append(transfer)

    def in_flight(self, y: int) -> Transfer:
        """The transfer that is bringing y."""
        return next(transfer for transfer in self._in_flight if transfer.y == y)

    def cancel(self, step: int) -> None:
        """Drop every queued prefetch aimed at this step or an earlier one."""
        overtaken = [transfer for transfer in self._prefetches if transfer.target_step <= step]
        self._prefetches = deque(transfer for transfer in self._prefetches if transfer.target_step > step)
        for transfer in overtaken:
            self._below.release(transfer.y)
            self.abandon(transfer)

    def abandon(self, transfer: Transfer) -> None:
        """A prefetch comes too late and goes no further."""
        self._cache.forget(transfer.y)
        self._note(transfer, "prefetch_cancelled", "cancel")

    def wake(self) -> None:
        """Start whatever can start now."""
        while len(self._in_flight) < self._channel.depth and self._start_one():
            pass

    def _start_one(self) -> bool:
        if self._demands:
            return self._start_demand()
        while self._prefetches:
            transfer = self._prefetches.popleft()
            if self._into.claim(transfer) is Claim.GRANTED:
                self._begin(transfer)
                return True
            self._below.release(transfer.y)
            self._cache.forget(transfer.y)
            self._note(transfer, "prefetch_dropped", "drop")
        return False

    def _start_demand(self) -> bool:
        """The head of the queue or nothing: a demand that finds no space blocks the link."""
        if self._into.claim(self._demands[0]) is Claim.REFUSED:
            return False
        self._begin(self._demands.popleft())
        return True

    def _begin(self, transfer: Transfer) -> None:
        activity = self._channel.start(transfer, self.beside_cpu)
        self._in_flight.append(transfer)
        self._below.read(transfer.y)
        kind = "transfer" if self._into is self._cache else "fill"
        for counter, amount in self._moved(transfer):
            self._counters.count(counter, transfer.layer, amount)
        self._log.begin(kind, transfer.y, activity, transfer.cause)
        self._counters.charge(activity, "link_busy_ns", transfer.layer)
        self._unmeasured += 1
        activity.measured(self._measured)
        if not self._closed:
            epoch = self._epoch
            if activity.first_piece is not None and activity.span is not None:
                transfer.lands = activity.span.ended
                activity.first_piece.then(lambda: self._first_piece(transfer, epoch))
            activity.then(lambda: self._complete(transfer, epoch))

    def _moved(self, transfer: Transfer) -> list[tuple[str, int]]:
        """What a transfer that starts adds to the counters."""
        size = self._cache.tables.copies[transfer.y]["bytes"]
        if self._into is not self._cache:
            return [("bytes_lower", size)]
        if transfer.prefetch:
            return [("prefetch_started", 1), ("bytes_prefetch", size)]
        return [("bytes_demand", size)]

    def _measured(self, _: Span) -> None:
        self._unmeasured -= 1

    def _first_piece(self, transfer: Transfer, epoch: int) -> None:
        """One LINK event: compute is woken if it waits for this, as if it were complete."""
        if epoch == self._epoch:
            transfer.piece_here = True
            self._landed(transfer)

    def lands(self, y: int) -> int:
        """When the transfer that is bringing y will be complete, if compute may begin before; else 0."""
        return next((transfer.lands for transfer in self._in_flight if transfer.y == y), 0)

    def _complete(self, transfer: Transfer, epoch: int) -> None:
        """One LINK event: resident, next transfers started, compute woken."""
        if epoch != self._epoch:  # abandoned by a reset
            return
        self._in_flight.remove(transfer)
        self._below.release(transfer.y)
        self._into.land(transfer)
        self._landed(transfer)

    def _note(self, transfer: Transfer, counter: str, kind: str) -> None:
        self._counters.count(counter, transfer.layer)
        self._log.note(kind, transfer.y, transfer.cause)
