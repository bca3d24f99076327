"""Our own: the nearest of 2**bits evenly spaced values between the least and the greatest weight of each group of 64.

A group stores these two unchanged, in the weight's own precision, so that they are exact, and bfloat16 costs half a
bit per weight. Bits may be a fraction: 2.5 bits are 6 values, in 3 bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moereplay.tracegen.precision.contract import Packed, Quantiser
from moereplay.tracegen.precision.integers import BYTE, grouped, packed, ungrouped, unpacked

EXACT = 20  #: bits up to which float32 divides without reaching one value too many


def pack(weight: Tensor, bits: float) -> Packed:
    """Return values, and both ends of each group (out, groups)."""
    groups = grouped(weight)
    ends = groups.aminmax(dim=-1, keepdim=True)
    low, step = _grid(ends.min, ends.max, bits)
    steps = torch.where(step > 0, (groups.float() - low) / step, 0).round()  # a constant group is its own grid
    width, shape = _width(bits), (weight.shape[0], weight.shape[1])
    # only where a step is rounded to a number next to zero can there be more of them than values
    values = ungrouped(steps.clamp_(0, 2**width - 1).to(torch.uint8 if width <= BYTE else torch.int64), shape)
    kept = {"values": packed(values.flatten(), width), "low": ends.min.squeeze(-1), "high": ends.max.squeeze(-1)}
    return Packed(kept, shape, bits)


def restore(kept: Packed, dtype: torch.dtype) -> Tensor:
    """Return (out, in) of `dtype`."""
    low, step = _grid(kept.tensors["low"][..., None], kept.tensors["high"][..., None], kept.bits)
    values = unpacked(kept.tensors["values"], _width(kept.bits), kept.shape[0] * kept.shape[1])
    groups = grouped(values.view(kept.shape).float())
    return ungrouped(low + groups * step, kept.shape).to(dtype)


def _grid(low: Tensor, high: Tensor, bits: float) -> tuple[Tensor, Tensor]:
    """Return the least value of each group, and the step between values."""
    return low.float(), (high.float() - low.float()) / (_values(bits) - 1)


def _values(bits: float) -> int:
    return max(round(2**bits), 2)


def _width(bits: float) -> int:
    """Return the bits of one value; of very many, rounding may make the greatest 2**bits."""
    return (_values(bits) - (bits <= EXACT)).bit_length()


QUANTISER = Quantiser(
    name="affine",
    summary="ours: evenly spaced between the ends of each group of 64",
    pack=pack,
    restore=restore,
    widths=None,
    moves=False,
)
