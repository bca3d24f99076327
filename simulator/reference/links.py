"""All links: a transfer crosses one after the other, up from the highest tier that holds its copy to the fast tier.

The link into the fast tier is that of the expert's home. At the same time the lower row acts first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.counters import Counters
from moereplay.simulator.reference.link import Link
from moereplay.simulator.reference.log import EventLog
from moereplay.simulator.reference.lower_tiers import LowerTier, SlowTier
from moereplay.simulator.reference.machine import Channel
from moereplay.simulator.reference.transfers import Transfer
from moereplay.simulator.times import Times


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
    ) -> None:
        """A channel for each link that the times are of; `lower` are the bytes of the lower tiers.

        `arrived` is told of what compute may begin with, `moved` of every event of a link.
        Raises ValueError where a channel is missing.
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
        homes = [Link(channel, *shared, below[0], None, self._landed) for channel in channels[:first]]
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
        """A demand that will be fetched: it counts as queued, but does not start before `fetch_announced`."""
        self._cache.queue(transfer.y)
        self._announced += 1

    def fetch_announced(self, transfer: Transfer) -> None:
        """Queue a demand that was announced."""
        self._announced -= 1
        self.fetch(transfer)

    def prefetch(self, transfer: Transfer) -> None:
        """Queue a prefetch."""
        self._cache.queue(transfer.y)
        self._send(transfer)
        self._counters.count("prefetch_issued", transfer.layer)

    def _send(self, transfer: Transfer) -> None:
        """To the next link up; a copy that is under way into a lower tier goes on with this transfer."""
        for tier in self._lower:
            if transfer.y in tier.coming:
                tier.coming[transfer.y] = transfer
                return
        holder = next((n for n, tier in enumerate(self._lower) if transfer.y in tier), len(self._lower))
        link = self._fills[holder - 1] if holder else self._home(transfer.y)
        link.add(transfer)

    def in_flight(self, y: int) -> Transfer:
        """The transfer that is bringing y into the fast tier."""
        return self._home(y).in_flight(y)

    def lands(self, y: int) -> int:
        """When the transfer that is bringing y will be complete, if compute may begin before; else 0."""
        return self._home(y).lands(y)

    def meet(self, transfer: Transfer) -> None:
        """A demand waits for this transfer, of which a first piece may have arrived."""
        if transfer.piece_here:
            self._arrived(transfer)

    def cancel(self, step: int) -> None:
        """Drop every prefetch aimed at this step or an earlier one that has not started into the fast tier."""
        for link in self._rows:
            link.cancel(step)
        for link, tier in zip(self._fills, self._lower, strict=True):
            for transfer in tier.stop(step):
                link.abandon(transfer)

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
        """Forget the queues, abandon what is in flight; the links are free at once and the lower tiers empty."""
        for link in self._rows:
            link.clear()
        for tier in self._lower:
            tier.clear()

    def close(self) -> None:
        """The run is about to end: what is issued from here on does not land any more."""
        for link in self._rows:
            link.close()

    def _landed(self, transfer: Transfer) -> None:
        """Its bytes may be evictable now, for whichever link waits for room."""
        self.wake()
        self._arrived(transfer)
        self._moved()

    def _filled(self, transfer: Transfer) -> None:
        """It is in a lower tier, and goes on if anybody wants it."""
        for tier in self._lower:
            onward = tier.coming.pop(transfer.y, None)
            if onward is not None:
                self._send(onward)
        self.wake()
        self._moved()
