"""All links between the tiers: a transfer goes over the link of its expert's home; lower links act first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulator.reference.cache import Cache
from simulator.reference.counters import Counters
from simulator.reference.link import Link
from simulator.reference.log import EventLog
from simulator.reference.machine import Channel
from simulator.reference.transfers import Transfer
from simulator.times import Times


class Links:
    """One `Link` per row of the platform."""

    def __init__(
        self,
        channels: Sequence[Channel],
        times: Times,
        cache: Cache,
        counters: Counters,
        log: EventLog,
        arrived: Callable[[Transfer], None],
    ) -> None:
        """A channel for each link that the times are of. Raises ValueError where one is missing."""
        if len(channels) != len(times.depth):
            raise ValueError(
                f"the machine has {len(channels)} links, the platform {len(times.depth)}; give each a channel"
            )
        self._rows = [Link(channel, cache, counters, log, self._landed) for channel in channels]
        self._homes, self._cache, self._now, self._arrived = times.homes, cache, cache.tables.now, arrived
        self._announced = 0  # demands that compute has yet to hand over

    def _of(self, y: int) -> Link:
        x = y // self._now["precisions"]
        return self._rows[self._homes[x % self._now["experts"]]]

    def fetch(self, transfer: Transfer) -> None:
        """Queue a demand, behind other demands of its link and ahead of all prefetches."""
        self._of(transfer.y).fetch(transfer)

    def announce(self, transfer: Transfer) -> None:
        """A demand that will be fetched: it counts as queued, but does not start before `fetch_announced`."""
        self._cache.queue(transfer.y)
        self._announced += 1

    def fetch_announced(self, transfer: Transfer) -> None:
        """Queue a demand that was announced."""
        self._announced -= 1
        self.fetch(transfer)

    def prefetch(self, transfer: Transfer) -> None:
        """Queue a prefetch, behind older ones of its link."""
        self._of(transfer.y).prefetch(transfer)

    def in_flight(self, y: int) -> Transfer:
        """The transfer that is bringing y."""
        return self._of(y).in_flight(y)

    def lands(self, y: int) -> int:
        """When the transfer that is bringing y will be complete, if compute may begin before; else 0."""
        return self._of(y).lands(y)

    def meet(self, transfer: Transfer) -> None:
        """A demand waits for this transfer, of which a first piece may have arrived."""
        if transfer.piece_here:
            self._arrived(transfer)

    def cancel(self, step: int) -> None:
        """Drop every queued prefetch aimed at this step or an earlier one."""
        for link in self._rows:
            link.cancel(step)

    def renew(self) -> None:
        """Drop every queued prefetch: the policy is about to predict again."""
        self.cancel(self._now["step"] + self._now["layers"])

    def wake(self) -> None:
        """Start whatever can start now. A demand that finds no room holds its own link only."""
        for link in self._rows:
            link.wake()

    def beside_cpu(self, computes: bool) -> None:
        """Whether the CPU computes now, and may take from the links' rates."""
        for link in self._rows:
            link.beside_cpu = computes

    @property
    def busy(self) -> bool:
        """Whether something is in flight on any link, or a demand is queued or about to be."""
        return self._announced > 0 or any(link.busy for link in self._rows)

    @property
    def moving(self) -> bool:
        """Whether something is in flight on any link."""
        return any(link.moving for link in self._rows)

    @property
    def unmeasured(self) -> bool:
        """Whether a transfer, perhaps an abandoned one, is under way of which nobody knows how long it takes."""
        return any(link.unmeasured for link in self._rows)

    def clear(self) -> None:
        """Forget the queues, abandon what is in flight; the links are free at once."""
        for link in self._rows:
            link.clear()

    def close(self) -> None:
        """The run is about to end: what is issued from here on does not land any more."""
        for link in self._rows:
            link.close()

    def _landed(self, transfer: Transfer) -> None:
        """Its bytes may be evictable now, for whichever link waits for room."""
        self.wake()
        self._arrived(transfer)
