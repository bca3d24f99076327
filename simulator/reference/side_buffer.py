"""Speculative buffers beside the cache: prefetches go here and never evict a cached expert."""

from __future__ import annotations

from moereplay.policies.contract import NONE, RESIDENT
from moereplay.simulator.reference.tables import Tables
from moereplay.simulator.reference.transfers import Transfer


class SideBuffer:
    """`slots` buffers, each as large as the largest expert, in order of their transfers' start."""

    def __init__(self, tables: Tables, slots: int) -> None:
        self._tables, self.slots = tables, slots
        self.clear()

    def clear(self) -> None:
        """Empty every buffer."""
        self._held: dict[int, Transfer] = {}

    def __contains__(self, y: int) -> bool:
        return y in self._held

    def put(self, transfer: Transfer) -> None:
        """A transfer starts into a free buffer."""
        self._held[transfer.y] = transfer

    def take(self, y: int) -> None:
        """Free the buffer of copy y."""
        del self._held[y]

    @property
    def full(self) -> bool:
        """Whether no buffer is free."""
        return len(self._held) >= self.slots

    def overwritable(self) -> int:
        """The oldest copy whose gate has passed and that is not pinned, or NONE."""
        return next((y for y, transfer in self._held.items() if self._is_stale(transfer)), NONE)

    def _is_stale(self, transfer: Transfer) -> bool:
        now, copy = self._tables.now, self._tables.copies[transfer.y]
        passed = transfer.target_step < now["step"] or (transfer.target_step == now["step"] and now["gated"] == 1)
        return passed and copy["state"] == RESIDENT and not copy["protected"]
