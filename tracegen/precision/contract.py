"""What a quantiser is: how it stores a weight, what it stored, and how the weight comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """A weight as it is stored."""

    tensors: Mapping[str, Tensor]  #: values and scales, whatever the quantiser keeps
    shape: tuple[int, int]  #: (out, in) of the weight
    bits: float  #: as asked for

    @property
    def bytes(self) -> int:
        """Of all that is stored."""
        return sum(each.nbytes for each in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Of all that is stored, scales too."""
        return 8 * self.bytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Quantiser:
    """Stores weights in few bits. The same weight gives the same bytes, and the same bytes the same weight."""

    name: str
    summary: str
    pack: Callable[[Tensor, float], Packed]  #: of a weight (out, in) of float32, bfloat16 or float16
    restore: Callable[[Packed, torch.dtype], Tensor]  #: (out, in)
    widths: tuple[int, ...] | None  #: bits that it has, most first; None: any number, fractions too
    moves: bool = True  #: whether weights are moved to a CPU to be packed
    keeps: bool = False  #: whether packing takes so long that what was packed is kept on disk
