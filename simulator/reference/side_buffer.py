"""Speculative buffers beside the cache: prefetches go here and never evict a cached expert."""

from __future__ import annotations

from policies.contract import NONE, RESIDENT
from simulator.reference.jobs import Job
from simulator.reference.tables import Tables


class SideBuffer:
    """`slots` buffers, each as large as the largest expert, in order of their transfers' start."""

    def __init__(self, tables: Tables, slots: int) -> None:
        self._tables, self.slots = tables, slots
        self.clear()

    def clear(self) -> None:
        """Empty every buffer."""
        self._held: dict[int, Job] = {}

    def __contains__(self, y: int) -> bool:
        return y in self._held

    def put(self, job: Job) -> None:
        """A transfer starts into a free buffer."""
        self._held[job.y] = job

    def take(self, y: int) -> None:
        """Its buffer is free again."""
        del self._held[y]

    @property
    def full(self) -> bool:
        """No buffer is free."""
        return len(self._held) >= self.slots

    def overwritable(self) -> int:
        """The oldest copy whose gate has passed and that nobody uses, or NONE."""
        return next((y for y, job in self._held.items() if self._is_stale(job)), NONE)

    def _is_stale(self, job: Job) -> bool:
        now, copy = self._tables.now, self._tables.copies[job.y]
        passed = job.target_step < now["step"] or (job.target_step == now["step"] and now["gated"] == 1)
        return passed and copy["state"] == RESIDENT and not copy["protected"]
