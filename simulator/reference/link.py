"""Links: a link is a queue between two tiers; a transfer crosses the links up to the fast tier, one after the other.

Demand goes ahead of prefetch; transfers are first in, first out and never interrupted. The link into the fast tier is
that of the expert's home. At the same time the lower row acts first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.counters import Counters, EventLog
from moereplay.simulator.reference.machine import Activity, BatchChannel, Channel, Span
from moereplay.simulator.reference.state import Batch, Claim, Transfer
from moereplay.simulator.reference.tiers import Below, LowerTier, SlowTier
from moereplay.simulator.times import Times


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
        if epoch != self._epoch:
            return
        batch.landed += 1
        if last:
            self._complete_all(batch.transfers)
        self._landed(batch.transfers if last else ())

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
            activity.then(lambda: self._complete(transfer, epoch))

    def _moved(self, transfer: Transfer) -> list[tuple[str, int]]:
        """Return the counters that a starting transfer adds to."""
        size = self._cache.tables.copies[transfer.y]["bytes"]
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

    def _complete(self, transfer: Transfer, epoch: int) -> None:
        """Make the copy resident, start the next transfers and wake compute, all in one LINK event."""
        if epoch != self._epoch:  # abandoned by a reset
            return
        self._complete_all([transfer])
        self._landed([transfer])

    def _complete_all(self, transfers: Sequence[Transfer]) -> None:
        """Make the copies of one transfer resident, in their order."""
        self._crossings -= 1
        for transfer in transfers:
            self._in_flight.remove(transfer)
            self._below.release(transfer.y)
            self._into.land(transfer)

    @property
    def lacks_batch(self) -> bool:
        """True if demands are queued, and no batch of this link has started that compute has not taken."""
        return bool(self._demands) and not self.started

    def _note(self, transfer: Transfer, counter: str, kind: str) -> None:
        self._counters.count(counter, transfer.layer)
        self._log.note(kind, transfer.y, transfer.cause)


# all links


class Links:
    """A `Link` for each row of the platform: into the fast tier, then one into each lower tier from the top down."""

    def __init__(
        self,
        channels: Sequence[Channel],
        times: Times,
        lower: Sequence[int],
        cache: Cache,
        counters: Counters,
        log: EventLog,
        arrived: Callable[[Transfer], None],
        moved: Callable[[], None],
        batches: Sequence[BatchChannel] = (),
    ) -> None:
        """Connect a channel for each link of `times`; `lower` are the bytes of the lower tiers.

        `batches` are the channels if links read matrix by matrix. `arrived` is called for each arrival that compute
        may begin with, `moved` for every event of a link. Raises ValueError if a channel is missing.
        """
        if len(channels) != len(times.depth):
            raise ValueError(
                f"the machine has {len(channels)} links, the platform {len(times.depth)}; give each a channel"
            )
        self._cache, self._counters = cache, counters
        self._homes, self._now, self._arrived, self._moved = times.homes, cache.tables.now, arrived, moved
        self._announced = 0  # demands that compute has yet to hand over
        self._lower = [LowerTier(cache.tables, capacity) for capacity in lower]
        below = [*self._lower, SlowTier()]
        first = len(channels) - len(lower)
        shared = cache, counters, log
        reading = batches or [None] * first
        homes = [
            Link(channel, *shared, below[0], None, self._landed, batch)
            for channel, batch in zip(channels[:first], reading, strict=True)
        ]
        rising = zip(channels[first:], below[1:], self._lower, strict=True)
        self._fills = [Link(channel, *shared, source, tier, self._filled) for channel, source, tier in rising]
        self._rows = homes + self._fills

    def _home(self, y: int) -> Link:
        x = y // self._now["precisions"]
        return self._rows[self._homes[x % self._now["experts"]]]

    def fetch(self, transfer: Transfer) -> None:
        """Queue a demand."""
        self._cache.queue(transfer.y)
        self._send(transfer)

    def announce(self, transfer: Transfer) -> None:
        """Mark a demand as queued; it does not start before `fetch_announced`."""
        self._cache.queue(transfer.y)
        self._announced += 1

    def fetch_announced(self, transfer: Transfer) -> None:
        """Queue a demand that was announced."""
        self._announced -= 1
        self.fetch(transfer)

    def prefetch(self, transfer: Transfer) -> None:
        """Queue a prefetch."""
        self.announce_prefetch(transfer)
        self._send(transfer)

    def announce_prefetch(self, transfer: Transfer) -> None:
        """Mark a prefetch as queued; it does not start before `prefetch_announced`."""
        self._cache.queue(transfer.y)
        self._counters.count("prefetch_issued", transfer.layer)

    def prefetch_announced(self, transfer: Transfer) -> None:
        """Queue a prefetch that was announced."""
        self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        """Queue on the next link up; a copy in flight to a lower tier continues with this transfer."""
        for tier in self._lower:
            if transfer.y in tier.coming:
                tier.coming[transfer.y] = transfer
                return
        holder = next((n for n, tier in enumerate(self._lower) if transfer.y in tier), len(self._lower))
        link = self._fills[holder - 1] if holder else self._home(transfer.y)
        link.add(transfer)

    def in_flight(self, y: int) -> Transfer:
        """Return the transfer that is bringing y into the fast tier."""
        return self._home(y).in_flight(y)

    def lands(self, y: int) -> int:
        """Return when the transfer that is bringing y will land, if compute may begin before; else 0."""
        return self._home(y).lands(y)

    def meet(self, transfer: Transfer) -> None:
        """Note that a demand waits for this transfer, whose first piece may have arrived."""
        if transfer.piece_here:
            self._arrived(transfer)

    def cancel(self, step: int) -> None:
        """Drop every prefetch for this step or an earlier one that has not started into the fast tier."""
        for link in self._rows:
            link.cancel(step)
        for link, tier in zip(self._fills, self._lower, strict=True):
            for transfer in tier.stop(step):
                link.abandon(transfer)

    def renew(self) -> None:
        """Drop every queued prefetch: the policy is about to predict again."""
        self.cancel(self._now["step"] + self._now["layers"])

    def wake(self) -> None:
        """Start every transfer that can start now. A demand without space blocks only its own link."""
        for link in self._rows:
            link.wake()

    def beside_cpu(self, computes: bool) -> None:
        """Set whether the CPU is computing, which may take from the links' rates."""
        for link in self._rows:
            link.beside_cpu = computes

    @property
    def busy(self) -> bool:
        """True if a transfer is in flight on any link, or a demand is queued or announced."""
        return self._announced > 0 or any(link.busy for link in self._rows)

    @property
    def moving(self) -> bool:
        """True if a transfer is in flight on any link."""
        return any(link.moving for link in self._rows)

    @property
    def all_started(self) -> bool:
        """True if every link on which demands wait has started a batch that compute has not taken."""
        return not any(link.lacks_batch for link in self._rows)

    @property
    def any_started(self) -> bool:
        """True if a batch has started that compute has not taken."""
        return any(link.started for link in self._rows)

    def take_batches(self) -> list[Batch]:
        """Return the batches that have started since the last call."""
        batches = [batch for link in self._rows for batch in link.started]
        for link in self._rows:
            link.started = []
        return batches

    @property
    def unmeasured(self) -> bool:
        """True if a transfer, perhaps an abandoned one, is in flight whose duration is unknown."""
        return any(link.unmeasured for link in self._rows)

    def clear(self) -> None:
        """Forget the queues, abandon transfers in flight; the links are free at once and the lower tiers empty."""
        for link in self._rows:
            link.clear()
        for tier in self._lower:
            tier.clear()

    def close(self) -> None:
        """Make transfers that start from now on land without effect: the run is about to end."""
        for link in self._rows:
            link.close()

    def _landed(self, transfers: Sequence[Transfer]) -> None:
        """Start links that wait for space, which the arrivals may have made evictable, then wake compute."""
        self.wake()
        for transfer in transfers:
            self._arrived(transfer)
        self._moved()

    def _filled(self, transfers: Sequence[Transfer]) -> None:
        """Send a copy on from a lower tier if a transfer wants it."""
        for tier, transfer in product(self._lower, transfers):
            onward = tier.coming.pop(transfer.y, None)
            if onward is not None:
                self._send(onward)
        self.wake()
        self._moved()
