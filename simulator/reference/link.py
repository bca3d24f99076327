"""A link: a queue between two tiers. Demand goes ahead of prefetch; transfers are never interrupted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.counters import Counters, EventLog
from moereplay.simulator.reference.machine import Activity, BatchChannel, Channel, Span
from moereplay.simulator.reference.state import Batch, Below, Claim, LowerTier, Transfer


class Link:
    """One link. Up to `depth` transfers are in flight at once; bytes are claimed when a transfer starts."""

    def __init__(
        self,
        channel: Channel,
        cache: Cache,
        counters: Counters,
        log: EventLog,
        below: Below,
        into: LowerTier | None,
        landed: Callable[[Sequence[Transfer]], None],
        batches: BatchChannel | None = None,
    ) -> None:
        """Connect the tier `below` to `into`, by default the cache; `landed` is called after that has been filled.

        `batches` is the channel if the link reads matrix by matrix.
        """
        self._batches = batches
        self._channel, self._cache, self._below, self._into = channel, cache, below, into or cache
        self._counters, self._log, self._landed = counters, log, landed
        self._epoch = self._unmeasured = 0
        self._closed = False
        self._empty()

    def clear(self) -> None:
        """Forget the queue and abandon transfers in flight; the link is free at once."""
        self._epoch += 1
        self._channel.abandon()
        self._empty()

    def close(self) -> None:
        """Make transfers that start from now on land without effect."""
        self._closed = True

    def _empty(self) -> None:
        self._demands: deque[Transfer] = deque()
        self._prefetches: deque[Transfer] = deque()
        self._in_flight: list[Transfer] = []
        self._crossings = 0  # transfers in flight, a batch being one
        self.started: list[Batch] = []  #: batches that compute has not taken
        self.beside_cpu = False  #: the CPU computes now, and may take from this link's rate

    @property
    def unmeasured(self) -> bool:
        """True if a transfer, perhaps an abandoned one, is in flight whose duration is unknown."""
        return self._unmeasured > 0

    @property
    def busy(self) -> bool:
        """True if a transfer is in flight, or a demand is queued."""
        return bool(self._in_flight or self._demands)

    @property
    def moving(self) -> bool:
        """True if a transfer is in flight."""
        return bool(self._in_flight)

    def add(self, transfer: Transfer) -> None:
        """Queue a transfer: a demand behind other demands and ahead of all prefetches, a prefetch behind older ones."""
        self._below.hold(transfer.y)
        (self._prefetches if transfer.prefetch else self._demands).append(transfer)

    def in_flight(self, y: int) -> Transfer:
        """Return the transfer that is bringing y."""
        return next(transfer for transfer in self._in_flight if transfer.y == y)

    def cancel(self, step: int) -> None:
        """Drop every queued prefetch for this step or an earlier one."""
        overtaken = [transfer for transfer in self._prefetches if transfer.target_step <= step]
        self._prefetches = deque(transfer for transfer in self._prefetches if transfer.target_step > step)
        for transfer in overtaken:
            self._below.release(transfer.y)
            self.abandon(transfer)

    def abandon(self, transfer: Transfer) -> None:
        """Cancel a prefetch that comes too late."""
        self._cache.forget(transfer.y)
        self._note(transfer, "prefetch_cancelled", "cancel")

    def wake(self) -> None:
        """Start every transfer that can start now."""
        while self._crossings < self._channel.depth and self._start_one():
            pass

    def _start_one(self) -> bool:
        if self._demands:
            return self._start_demand() if self._batches is None else self._start_batch(self._batches)
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
        """Start the head of the queue; a demand that finds no space blocks the link."""
        if self._into.claim(self._demands[0]) is Claim.REFUSED:
            return False
        self._begin(self._demands.popleft())
        return True

    def _start_batch(self, channel: BatchChannel) -> bool:
        """Start one transfer of as many demands as find space, in demand order; the first that finds none waits."""
        batch = Batch([])
        while self._demands and self._into.claim(self._demands[0]) is not Claim.REFUSED:
            batch.transfers.append(self._demands.popleft())
        if not batch.transfers:
            return False
        *_, whole = landings = channel.start_batch(batch.transfers, self.beside_cpu)
        self._issue(batch.transfers, whole)
        self.started.append(batch)
        for landing in landings:
            landing.then(partial(self._matrix_landed, batch, landing is whole, self._epoch))
        return True

    def _matrix_landed(self, batch: Batch, last: bool, epoch: int) -> None:
        """Note that one matrix of all experts of a batch has landed; the last one makes them resident."""
        batch.landed += 1
        if last:
            self._complete(batch.transfers, epoch)
        elif epoch == self._epoch:
            self._landed(())

    def _issue(self, transfers: Sequence[Transfer], activity: Activity) -> None:
        """Count and log one transfer of these copies."""
        self._crossings += 1
        for transfer in transfers:
            self._in_flight.append(transfer)
            self._below.read(transfer.y)
            kind = "transfer" if self._into is self._cache else "fill"
            for counter, amount in self._moved(transfer):
                self._counters.count(counter, transfer.layer, amount)
            self._log.begin(kind, transfer.y, activity, transfer.cause)
        self._counters.charge(activity, "link_busy_ns", transfers[0].layer)
        self._unmeasured += 1
        activity.measured(self._measured)

    def _begin(self, transfer: Transfer) -> None:
        activity = self._channel.start(transfer, self.beside_cpu)
        self._issue([transfer], activity)
        if not self._closed:
            epoch = self._epoch
            if activity.first_piece is not None and activity.span is not None:
                transfer.lands = activity.span.ended
                activity.first_piece.then(lambda: self._first_piece(transfer, epoch))
            activity.then(lambda: self._complete([transfer], epoch))

    def _moved(self, transfer: Transfer) -> list[tuple[str, int]]:
        """Return the counters that a starting transfer adds to."""
        size = self._cache.tables.own_bytes[transfer.y]
        if self._into is not self._cache:
            return [("bytes_lower", size)]
        if transfer.prefetch:
            return [("prefetch_started", 1), ("bytes_prefetch", size)]
        return [("bytes_demand", size)]

    def _measured(self, _: Span) -> None:
        self._unmeasured -= 1

    def _first_piece(self, transfer: Transfer, epoch: int) -> None:
        """Wake compute, in a LINK event, as if the transfer were complete."""
        if epoch == self._epoch:
            transfer.piece_here = True
            self._landed([transfer])

    def lands(self, y: int) -> int:
        """Return when the transfer that is bringing y will land, if compute may begin before; else 0."""
        return next((transfer.lands for transfer in self._in_flight if transfer.y == y), 0)

    def _complete(self, transfers: Sequence[Transfer], epoch: int) -> None:
        """Make the copies resident in their order, start the next transfers and wake compute, all in one LINK event."""
        if epoch != self._epoch:  # abandoned by a reset
            return
        self._crossings -= 1
        for transfer in transfers:
            self._in_flight.remove(transfer)
            self._below.release(transfer.y)
            self._into.land(transfer)
        self._landed(transfers)

    @property
    def lacks_batch(self) -> bool:
        """True if demands are queued, and no batch of this link has started that compute has not taken."""
        return bool(self._demands) and not self.started

    def _note(self, transfer: Transfer, counter: str, kind: str) -> None:
        self._counters.count(counter, transfer.layer)
        self._log.note(kind, transfer.y, transfer.cause)
