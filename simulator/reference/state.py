"""State that the parts of a run share: the policies' tables, transfers, where copies lie, the tiers outside the cache.

Every policy reads the tables; only the engine writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from moereplay.policies.contract import ABSENT, COPY_COLUMNS, EXPERT_COLUMNS, NEVER, NONE, NOW, RESIDENT
from moereplay.simulator.interface import CopyLayout, Oracle


class Tables:
    """`now`, and a row per expert and per copy, by the columns of the contract."""

    def __init__(self, layout: CopyLayout, pool_of: Sequence[int], oracle: Oracle, seed: int) -> None:
        """`pool_of` has the pool of every expert x."""
        geometry = layout.geometry
        self.now = dict.fromkeys(NOW.names or (), 0) | {
            "layers": geometry.layers,
            "experts": geometry.experts,
            "k": geometry.k,
            "precisions": layout.precisions,
            "seed": seed,
        }
        unknown = dict.fromkeys(EXPERT_COLUMNS, 0) | dict.fromkeys(("next_use", "next_pass", "profile"), NEVER)
        self.experts = [unknown | {"layer": x // geometry.experts} for x in range(layout.experts)]
        self.copies = [
            dict.fromkeys(COPY_COLUMNS, 0) | {"bytes": size, "pool": pool_of[y // layout.precisions]}
            for y, size in enumerate(layout.taken.tolist())
        ]
        self.own_bytes: list[int] = layout.own_bytes.tolist()  #: of each copy; in its pool it may take more
        for x, position in enumerate(oracle.first_uses):
            self.experts[x]["next_use"] = position
        for x, first_pass in enumerate(oracle.first_passes):
            self.experts[x]["next_pass"] = first_pass
        self._rank(oracle.ranking, max(pool_of) + 1)
        self.clear()

    def _rank(self, ranking: Sequence[int], pools: int) -> None:
        """Set `profile`: the bytes of its pool that the profile ranks before each expert."""
        taken = [0] * pools
        for x in ranking:
            copy = self.copies[x * self.now["precisions"]]
            self.experts[x]["profile"] = taken[copy["pool"]]
            taken[copy["pool"]] += copy["bytes"]

    def clear(self) -> None:
        """Reset to the start, except for oracle information and profile."""
        for row in self.experts:
            row.update(last_use=0, last_pass=-1, prediction_pass=-1, last_prediction=0, uses_ever=0, uses_here=0)
            row.update(mass_ever=0, needed=0)
        for row in self.copies:
            row.update(state=ABSENT, protected=0, entered=0, prefetched=0, lower=0)


# transfers


class Claim(Enum):
    """The cache's verdict on a transfer that is about to start."""

    GRANTED = 0
    BYPASSED = 1  #: a demand whose admission was rejected: it goes to the bypass buffer
    REFUSED = 2  #: no space, or a prefetch whose admission was rejected


@dataclass
class Transfer:
    """One expert copy that crosses the links."""

    y: int
    layer: int
    prefetch: bool
    target_step: int
    awaited: bool = False  #: a demand has met this prefetch in flight
    bypasses: bool = False  #: to the bypass buffer, not into the cache
    for_cpu: bool = False  #: it ends in the lower tier that the CPU reads
    onward: Transfer | None = None  #: of one for the CPU: a prefetch that goes on from there
    lands: int = 0  #: when it will be complete, if compute may begin before
    piece_here: bool = False  #: its first piece has arrived
    victims: int = 0  #: copies that left the fast tier for it when it started
    arrival_known: bool = False  #: compute knows that it may begin

    @property
    def unused(self) -> bool:
        """True for a prefetch that no demand has met in flight."""
        return self.prefetch and not self.awaited

    @property
    def cause(self) -> str:
        """Cause in the words of the event log: cpu, demand, prefetch or streamed."""
        if self.for_cpu:
            return "cpu"
        return "prefetch" if self.prefetch else "streamed" if self.bypasses else "demand"


@dataclass(eq=False)
class Batch:
    """Demands of one step that cross a link as one transfer, matrix by matrix."""

    transfers: list[Transfer]
    landed: int = 0  #: matrices that have landed, each of all experts


# where copies lie


class Area(Enum):
    """A part of the fast tier."""

    POOL = 0  #: the cache, within its capacity
    BYPASS = 1  #: the buffer of one expert for a demand whose admission was rejected
    SIDE = 2  #: the buffers of a prefetch policy


class Placement(Protocol):
    """Tracks the places of copies y, for a holder of real bytes. Space is vacated before it is reused.

    Methods that a class does not define do nothing.
    """

    def warmed(self, y: int) -> None:
        """Load copy y, which lies in the pool from the start, before returning."""

    def placed(self, y: int, area: Area) -> None:
        """Take space for copy y; the transfer that fills it starts next."""

    def promoted(self, y: int) -> None:
        """Move copy y, which is complete, from its side buffer to the pool."""

    def vacated(self, y: int) -> None:
        """Free the space of copy y. After a reset its transfer may still be in flight."""


class NullPlacement(Placement):
    """Placement without real bytes, for the simulated machine."""


# tiers outside the cache: those below the fast tier, and the side buffers of a prefetch policy; they know bytes


class Below(Protocol):
    """A tier that a link reads. A copy is held from when its transfer is queued until it has crossed the link.

    Methods that a class does not define do nothing.
    """

    def __contains__(self, y: int) -> bool: ...

    def hold(self, y: int) -> None:
        """Pin a copy."""

    def release(self, y: int) -> None:
        """Unpin a copy."""

    def read(self, y: int) -> None:
        """Note that a copy starts to cross the link."""


class SlowTier(Below):
    """The slowest tier, which has every expert and evicts none."""

    def __contains__(self, y: int) -> bool:
        return True


class LowerTier:
    """A cache between the fast and the slow tier: LRU over reads and arrivals, or first in, first out."""

    def __init__(self, tables: Tables, highest: bool, capacity: int, fifo: bool) -> None:
        """`capacity` in bytes; policies see what the `highest` has."""
        self._tables, self._highest, self._capacity, self._fifo = tables, highest, capacity, fifo
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
        """Move a copy to the end of the eviction order; no effect under FIFO."""
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
            self._show(y, False)
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
        self._show(transfer.y, True)

    def warm(self, y: int) -> None:
        """Make a copy resident before the start."""
        self._order[y] = None
        self._show(y, True)
        self._used += self._bytes(y)

    def _show(self, y: int, here: bool) -> None:
        if self._highest:
            self._tables.copies[y]["lower"] = int(here)

    def _bytes(self, y: int) -> int:
        return self._tables.own_bytes[y]


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
