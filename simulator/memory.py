"""The most bytes that a replay's machine has to hold, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moereplay.simulator.capacity import RUNTIME
from moereplay.simulator.platform import Platform
from moereplay.traces.units import GB


class Peak(NamedTuple):
    """Bytes by what needs them, and the memory that is to hold them."""

    parts: Mapping[str, int]
    memory_bytes: float
    stated: bool  #: the platform states the system's memory, so that everything is counted

    @property
    def total(self) -> int:
        """Sum over the parts."""
        return sum(self.parts.values())

    @property
    def will_page(self) -> bool:
        """True if the memory does not hold the parts."""
        return self.total > self.memory_bytes

    @property
    def in_words(self) -> str:
        """The parts, largest units first: `4 GB of the cache, 1.9 GB of dense weights`."""
        return ", ".join(f"{size / GB:.4g} GB of {name}" for name, size in self.parts.items() if size)

    def document(self) -> dict[str, Any]:
        """Return the peak for `about` of a result."""
        known = {"peak_bytes": self.total, "memory_bytes": int(self.memory_bytes), "will_page": self.will_page}
        return known | {"parts": {name.removeprefix("the "): size for name, size in self.parts.items()}}


def peak(machine: Platform, parts: Mapping[str, int], kv_bytes: int) -> Peak | None:
    """Return the peak for a cache, buffers and weights of these `parts`; None if the machine's memory is unknown.

    The KV cache of `kv_bytes`, an assumed runtime and the reserve count where the platform states the reserve.
    """
    if machine.memory_bytes is None:
        return None
    if machine.reserve_bytes is None:
        return Peak(parts, machine.memory_bytes, stated=False)
    others = {"KV cache": kv_bytes, "runtime (assumed)": RUNTIME, "reserve": int(machine.reserve_bytes)}
    return Peak({**parts, **others}, machine.memory_bytes, stated=True)
