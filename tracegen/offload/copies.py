"""Copies of a run, of one precision or several: where each is read from, and what its bytes are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moereplay.tracegen.offload.compute import Shape, as_weights
from moereplay.tracegen.offload.experts import Layout, check_marks, marks_of
from moereplay.tracegen.offload.slow_tier import SlowTier


class Copies:
    """Copies y = x * P + p of experts x = layer * E + e at precisions p, the most precise first."""

    def __init__(self, tiers: Sequence[SlowTier]) -> None:
        """A slow tier for each precision."""
        self._tiers = tiers
        self._marks = [marks_of(tier.layout) for tier in tiers]

    def size(self, y: int) -> int:
        """Bytes of the copy."""
        layout, x = self._of(y)
        return layout.size(x)

    def read(self, y: int, into: Tensor) -> None:
        """Fill a slot, (n,) uint8, with the copy. Raises OSError."""
        self._tiers[y % len(self._tiers)].read(y // len(self._tiers), into)

    def on_host(self, y: int) -> Tensor:
        """The copy's bytes where a CPU computes with them, (n,) uint8. One thread asks. Raises OSError."""
        return self._tiers[y % len(self._tiers)].on_host(y // len(self._tiers))

    def weights(self, y: int, slot: Tensor, shape: Shape) -> Tensor:
        """(params,) of the copy in a slot. Raises AssertionError if other bytes lie there."""
        layout, x = self._of(y)
        check_marks(slot, layout.size(x), self._marks[y % len(self._tiers)][x], y)
        return as_weights(slot, layout.dtype, shape)

    def _of(self, y: int) -> tuple[Layout, int]:
        x, precision = divmod(y, len(self._tiers))
        return self._tiers[precision].layout, x
