"""The fast tier as real memory: equal slots of whole pages, one copy each."""

from __future__ import annotations

from torch import Tensor

from simulator.errors import ConfigError
from simulator.reference.placement import Area
from tracegen.offload.device import free_memory, memory_of
from tracegen.offload.experts import PAGE
from tracegen.offload.slow_tier import SlowTier


class Arena:
    """Slots of memory of a device, each as large as the largest expert."""

    def __init__(self, slots: int, size: int, device: str) -> None:
        """`size` bytes each, rounded up to pages. On a CPU every page is touched once, now."""
        self.size, self.slots = -(-size // PAGE) * PAGE, slots
        self._bytes = memory_of(device, slots * self.size)

    def of(self, slot: int) -> Tensor:
        """The bytes of a slot, (size,) uint8."""
        return self._bytes[slot * self.size : (slot + 1) * self.size]


def arena_of(slots: int, size: int, device: str) -> Arena:
    """Raises ConfigError where the slots do not fit the device's memory."""
    if slots * size > (free := free_memory(device)):
        raise ConfigError(
            f"the cache needs {slots * size / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; take less --capacity"
        )
    return Arena(slots, size, device)


class Slots:
    """Which slot has which copy, as the engine places them in one run."""

    def __init__(self, arena: Arena, slow: SlowTier) -> None:
        """All slots are free; what is warm is read from the slow tier at once."""
        self._arena, self._slow = arena, slow
        self._free = list(range(arena.slots))
        self._slot: dict[int, int] = {}

    def of(self, y: int) -> Tensor:
        """The bytes of the slot that copy y has now."""
        return self._arena.of(self._slot[y])

    def warmed(self, y: int) -> None:
        """Read before the run begins."""
        self.placed(y, Area.POOL)
        self._slow.read(y, self.of(y))

    def placed(self, y: int, area: Area) -> None:
        """A free slot, wherever it is."""
        self._slot[y] = self._free.pop()

    def promoted(self, y: int) -> None:
        """It stays where it is: all slots are alike."""

    def vacated(self, y: int) -> None:
        """Its slot is free. A read that is still under way ends before the next one into this slot begins."""
        self._free.append(self._slot.pop(y))
