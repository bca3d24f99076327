"""All links: a transfer crosses one after the other, up from the highest tier that holds its copy.

The link into the fast tier is that of the expert's home. At the same time the lower row acts first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from moereplay.simulator.reference.cache import Cache
from moereplay.simulator.reference.counters import Counters, EventLog
from moereplay.simulator.reference.link import Link
from moereplay.simulator.reference.machine import BatchChannel, Channel
from moereplay.simulator.reference.state import Batch, LowerTier, SlowTier, Transfer
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
        batches: Sequence[BatchChannel] = (),
    ) -> None:
        """Connect a channel for each link of `times`; `lower` are the bytes of the lower tiers.

        `batches` are the channels if links read matrix by matrix. Raises ValueError if a channel is missing.
        """
        if len(channels) != len(times.depth):
            raise ValueError(
                f"the machine has {len(channels)} links, the platform {len(times.depth)}; give each a channel"
            )
        self._cache, self._counters = cache, counters
        self._homes, self._now, self._cpu_tier = times.homes, cache.tables.now, times.cpu_tier
        self._announced = 0  # demands that compute has yet to hand over
        self._for_cpu: dict[int, Transfer] = {}  # copy -> what brings it to the tier that the CPU reads
        self._lower = [
            LowerTier(cache.tables, n == 0, *each) for n, each in enumerate(zip(lower, times.fifo, strict=True))
        ]
        below = [*self._lower, SlowTier()]
        first = len(channels) - len(lower)
        shared = cache, counters, log
        reading = batches or [None] * first
        homes = [
            Link(channel, *shared, below[0], None, self._landed, batch)
            for channel, batch in zip(channels[:first], reading, strict=True)
        ]
        rising = enumerate(zip(channels[first:], below[1:], self._lower, strict=True))
        self._fills = [
            Link(channel, *shared, source, tier, partial(self._filled, n)) for n, (channel, source, tier) in rising
        ]
        self._rows = homes + self._fills

    def _home(self, y: int) -> Link:
        x = y // self._now["precisions"]
        return self._rows[self._homes[x]]

    def report_to(
        self, arrived: Callable[[Transfer], None], moved: Callable[[], None], here_for_cpu: Callable[[Transfer], None]
    ) -> None:
        """Call `arrived` for each arrival that compute may begin with, `moved` for every event of a link.

        `here_for_cpu` is called for what has come where the CPU reads.
        """
        self._arrived, self._moved, self._here_for_cpu = arrived, moved, here_for_cpu

    def warm(self, tiers: Sequence[Sequence[int]]) -> None:
        """Make these copies resident in the lower tiers, from the top down, before the start."""
        for tier, copies in zip(self._lower, tiers, strict=True):
            for y in copies:
                tier.warm(y)

    def announce(self, transfer: Transfer) -> None:
        """Mark a transfer as queued; it does not start before `queue`."""
        self._cache.queue(transfer.y)
        if transfer.prefetch:
            self._counters.count("prefetch_issued", transfer.layer)
        else:
            self._announced += 1

    def queue(self, transfer: Transfer) -> None:
        """Queue a transfer that was announced."""
        self._announced -= int(not transfer.prefetch)
        self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        """Queue on the next link up; a copy in flight to a lower tier continues with this transfer."""
        for n in range(self._cpu_tier if transfer.for_cpu else 0, len(self._lower)):
            if n == self._cpu_tier and not transfer.for_cpu and transfer.y in self._for_cpu:
                self._for_cpu[transfer.y].onward = transfer
                return
            if transfer.y in self._lower[n].coming:
                self._lower[n].coming[transfer.y] = transfer
                return
            if transfer.y in self._lower[n]:
                (self._fills[n - 1] if n else self._home(transfer.y)).add(transfer)
                return
        (self._fills[-1] if self._fills else self._home(transfer.y)).add(transfer)

    # what the CPU reads

    def read_by_cpu(self, transfer: Transfer) -> bool:
        """Hold a copy where the CPU reads it. Return False if it is not there: it is queued to come."""
        if self._cpu_tier < 0:
            return True
        tier = self._lower[self._cpu_tier]
        if transfer.y in tier:
            tier.hold(transfer.y)
            tier.read(transfer.y)
            return True
        for link, below in list(zip(self._fills, self._lower, strict=True))[self._cpu_tier :]:
            under_way = below.coming.get(transfer.y)
            if under_way is not None and under_way.prefetch:
                link.abandon(under_way)
        self._for_cpu[transfer.y] = transfer
        self._send(transfer)
        return False

    def computed_by_cpu(self, y: int) -> None:
        """Let go of a copy that the CPU has read; links that wait for its room may go on."""
        if self._cpu_tier >= 0:
            self._lower[self._cpu_tier].release(y)

    # what is in flight

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
        self._for_cpu.clear()

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

    def _filled(self, n: int, transfers: Sequence[Transfer]) -> None:
        """Send a copy on from a lower tier if a transfer wants it, or let the CPU have it."""
        for transfer in transfers:
            onward = self._lower[n].coming.pop(transfer.y)
            if onward is not None and onward.for_cpu and n == self._cpu_tier:
                self._filled_for_cpu(onward)
            elif onward is not None:
                self._send(onward)
        self.wake()
        self._moved()

    def _filled_for_cpu(self, transfer: Transfer) -> None:
        """Hold a copy until the CPU has read it, behind which a prefetch may go on."""
        del self._for_cpu[transfer.y]
        self._lower[self._cpu_tier].hold(transfer.y)
        self.wake()
        self._here_for_cpu(transfer)
        if transfer.onward is not None:
            self._send(transfer.onward)
