"""Tiers outside the cache: the caches below the fast tier, and the side buffers of a prefetch policy.

They know bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from moereplay.policies.contract import NONE, RESIDENT
from moereplay.simulator.reference.state import Claim, Tables, Transfer


class Below(Protocol):
    """A tier that a link reads. A copy is held from when its transfer is queued until it has crossed the link."""

    def __contains__(self, y: int) -> bool: ...

    def hold(self, y: int) -> None:
        """Pin a copy."""
        ...

    def release(self, y: int) -> None:
        """Unpin a copy."""
        ...

    def read(self, y: int) -> None:
        """Note that a copy starts to cross the link."""
        ...


class SlowTier:
    """The slowest tier, which has every expert and evicts none."""

    def __contains__(self, y: int) -> bool:
        return True

    def hold(self, y: int) -> None:
        """Do nothing."""

    def release(self, y: int) -> None:
        """Do nothing."""

    def read(self, y: int) -> None:
        """Do nothing."""


class LowerTier:
    """A cache between the fast and the slow tier: LRU over reads and arrivals, or first in, first out."""

    def __init__(self, tables: Tables, capacity: int, fifo: bool) -> None:
        """`capacity` in bytes."""
        self._tables, self._capacity, self._fifo = tables, capacity, fifo
        self.clear()

    def clear(self) -> None:
        """Evict everything."""
        self._order: dict[int, None] = {}  # copies that are complete, the longest unread first
        #: Copies on their way in, in the order of their start, each with the transfer that goes on from here, if any.
        self.coming: dict[int, Transfer | None] = {}
        self._held: Counter[int] = Counter()  # by links up, and by the CPU
        self._used = 0

    def __contains__(self, y: int) -> bool:
        return y in self._order

    def hold(self, y: int) -> None:
        """Pin a copy until everyone who holds it has released it."""
        self._held[y] += 1

    def release(self, y: int) -> None:
        """Unpin a copy."""
        self._held[y] -= 1

    def read(self, y: int) -> None:
        """Make a copy the last to be evicted, unless the first in is the first out."""
        if not self._fifo:
            del self._order[y]
            self._order[y] = None

    def claim(self, transfer: Transfer) -> Claim:
        """Take the bytes of a transfer that is about to start, evicting enough, or nothing at all."""
        size = self._bytes(transfer.y)
        victims = self._victims(self._used + size - self._capacity)
        if victims is None:
            return Claim.REFUSED
        for y in victims:
            del self._order[y]
            self._used -= self._bytes(y)
        self._used += size
        self.coming[transfer.y] = transfer
        return Claim.GRANTED

    def _victims(self, short: int) -> list[int] | None:
        """Return copies that free `short` bytes, None if there are not enough."""
        victims = []
        for y in self._order:
            if short <= 0:
                break
            if not self._held[y]:
                victims.append(y)
                short -= self._bytes(y)
        return victims if short <= 0 else None

    def stop(self, step: int) -> list[Transfer]:
        """Keep prefetches for this step or an earlier one in this tier; return those that do not go on."""
        stopped = [it for it in self.coming.values() if it and it.prefetch and it.target_step <= step]
        self.coming.update(dict.fromkeys(transfer.y for transfer in stopped))
        return stopped

    def land(self, transfer: Transfer) -> None:
        """Make a landed copy resident."""
        self._order[transfer.y] = None

    def _bytes(self, y: int) -> int:
        return self._tables.copies[y]["bytes"]


# side buffers


class SideBuffer:
    """Speculative buffers outside the cache: prefetches fill them and never evict a cached expert.

    Each of the `slots` is as large as the largest expert; they are kept in order of their transfers' start.
    """

    def __init__(self, tables: Tables, slots: int) -> None:
        self._tables, self.slots = tables, slots
        self.clear()

    def clear(self) -> None:
        """Empty every buffer."""
        self._held: dict[int, Transfer] = {}

    def __contains__(self, y: int) -> bool:
        return y in self._held

    def put(self, transfer: Transfer) -> None:
        """Put a starting transfer into a free buffer."""
        self._held[transfer.y] = transfer

    def take(self, y: int) -> None:
        """Free the buffer of copy y."""
        del self._held[y]

    @property
    def full(self) -> bool:
        """True if no buffer is free."""
        return len(self._held) >= self.slots

    def overwritable(self) -> int:
        """Return the oldest copy whose gate has passed and that is not pinned, or NONE."""
        return next((y for y, transfer in self._held.items() if self._is_stale(transfer)), NONE)

    def _is_stale(self, transfer: Transfer) -> bool:
        now, copy = self._tables.now, self._tables.copies[transfer.y]
        passed = transfer.target_step < now["step"] or (transfer.target_step == now["step"] and now["gated"] == 1)
        return passed and copy["state"] == RESIDENT and not copy["protected"]
