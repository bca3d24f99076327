"""The fast tier as real memory: slots of whole pages, equal for copies of a size, one copy each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moereplay.simulator.errors import ConfigError
from moereplay.simulator.reference.state import Area
from moereplay.tracegen.offload.memory import PAGE, Format, Layout, Marks, free_memory, marks_of, memory_of
from moereplay.tracegen.offload.slow_tier import SlowTier
from moereplay.traces.units import GB


class Arena:
    """Slots of memory of a device, each as large as a copy."""

    def __init__(self, slots: int, size: int, device: str) -> None:
        """Allocate slots of `size` bytes each, rounded up to pages. On a CPU every page is touched here."""
        self.size, self.slots = -(-size // PAGE) * PAGE, slots
        self._bytes = memory_of(device, slots * self.size)

    def of(self, slot: int) -> Tensor:
        """Return the bytes of a slot, (size,) uint8."""
        return self._bytes[slot * self.size : (slot + 1) * self.size]


def arena_of(slots: int, size: int, device: str) -> Arena:
    """Raises ConfigError where the slots do not fit the device's memory."""
    return arenas_of({size: slots}, device)[size]


def arenas_of(slots: Mapping[int, int], device: str) -> dict[int, Arena]:
    """Return an arena by bytes of a copy. Raises ConfigError if they do not fit into the device's memory."""
    needed, free = sum(size * each for size, each in slots.items()), free_memory(device)
    if needed > free:
        raise ConfigError(
            f"the cache needs {needed / GB:.3g} GB and {free / GB:.3g} GB are free; pass a smaller --capacity"
        )
    return {size: Arena(each, size, device) for size, each in slots.items()}


class Reads(Protocol):
    """Reads copies from the slow tier into slots."""

    def read(self, y: int, into: Tensor) -> None:
        """Copy y."""
        ...


class Slots:
    """Which slot has which copy, as the engine places them in one run."""

    def __init__(self, arenas: Sequence[Arena], reads: Reads) -> None:
        """Take an arena per precision. All slots are free; warm experts are read here."""
        self._arenas, self._reads = arenas, reads
        self._free = {id(arena): list(range(arena.slots)) for arena in arenas}
        self._slot: dict[int, int] = {}

    def _arena(self, y: int) -> Arena:
        return self._arenas[y % len(self._arenas)]

    def of(self, y: int) -> Tensor:
        """Return the bytes of the slot of copy y."""
        return self._arena(y).of(self._slot[y])

    def warmed(self, y: int) -> None:
        """Read before the run begins."""
        self.placed(y, Area.POOL)
        self._reads.read(y, self.of(y))

    def placed(self, y: int, area: Area) -> None:
        """Assign a free slot to the copy."""
        self._slot[y] = self._free[id(self._arena(y))].pop()

    def promoted(self, y: int) -> None:
        """Do nothing: the copy keeps its slot, because slots of a size are interchangeable."""

    def vacated(self, y: int) -> None:
        """Free the slot of the copy.

        A read into the slot that is still under way ends before the next one begins.
        """
        self._free[id(self._arena(y))].append(self._slot.pop(y))


# -- Copies of a run, of one precision or several: where each is read from, and what its bytes are.


class Copies:
    """Copies y = x * P + p of experts x = layer * E + e at precisions p, the most precise first."""

    def __init__(self, tiers: Sequence[SlowTier]) -> None:
        """Take a slow tier per precision."""
        self._tiers = tiers
        self._marks = [marks_of(tier.layout) for tier in tiers]

    def size(self, y: int) -> int:
        """Return the bytes of the copy."""
        layout, x = self._of(y)
        return layout.size(x)

    def read(self, y: int, into: Tensor) -> None:
        """Fill a slot, (n,) uint8, with the copy. Raises OSError."""
        self._tiers[y % len(self._tiers)].read(y // len(self._tiers), into)

    def on_host(self, y: int) -> Tensor:
        """Return the copy's bytes in main memory, (n,) uint8, for a CPU to compute with.

        Called by one thread. Raises OSError.
        """
        return self._tiers[y % len(self._tiers)].on_host(y // len(self._tiers))

    def format(self, y: int) -> Format:
        """Return how the copy is stored."""
        layout, x = self._of(y)
        return layout.format(x)

    @property
    def formats(self) -> list[Format]:
        """Return the formats of all copies."""
        layouts = [tier.layout for tier in self._tiers]
        return sorted({of.format(first) for of in layouts for first in range(0, of.count, of.experts)})

    def check(self, y: int, found: Marks) -> None:
        """Raises AssertionError unless every page of a slot has the mark of the copy."""
        mark = self._marks[y % len(self._tiers)][y // len(self._tiers)]
        if found != (mark, mark):
            raise AssertionError(f"the slot of expert {y} holds wrong bytes")

    def _of(self, y: int) -> tuple[Layout, int]:
        x, precision = divmod(y, len(self._tiers))
        return self._tiers[precision].layout, x
