"""torchao's Intx weights: symmetric groups of 64 without an offset, the default of its Intx configurations.

`IntxUnpackedToInt8Tensor` keeps a byte for each value at any width; here values are packed without gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moereplay.tracegen.precision.contract import Packed, Quantiser, imported
from moereplay.tracegen.precision.integers import GROUP, grouped, packed, ungrouped, unpacked

BLOCK = (1, GROUP)
MODULE = "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor"


def pack(weight: Tensor, bits: float) -> Packed:
    """Return values, and the scale of each group (out, groups). Raises RecordError without the library."""
    flat, shape = grouped(weight).float().flatten(1), (weight.shape[0], weight.shape[1])
    made = _library().from_hp(flat, BLOCK, _dtype(bits))
    values = (made.qdata[:, : shape[1]].short() + _half(bits)).to(torch.uint8)
    return Packed({"values": packed(values.flatten(), int(bits)), "scale": made.scale}, shape, bits)


def restore(kept: Packed, dtype: torch.dtype) -> Tensor:
    """Return (out, in) of `dtype`."""
    flat = as_theirs(kept).dequantize()
    return ungrouped(flat.unflatten(-1, (-1, GROUP)), kept.shape).to(dtype)


def as_theirs(kept: Packed) -> Any:
    """Return the tensor of torchao (out, in), float32, padded to whole groups."""
    values = unpacked(kept.tensors["values"], int(kept.bits), kept.shape[0] * kept.shape[1]).short() - _half(kept.bits)
    flat, scale = grouped(values.view(kept.shape)).flatten(1).to(torch.int8), kept.tensors["scale"]
    zero = torch.zeros_like(scale, dtype=torch.int8)
    return _library()(flat, scale, zero, _dtype(kept.bits), BLOCK, torch.float32, None)


def _half(bits: float) -> int:
    return 2 ** (int(bits) - 1)


def _dtype(bits: float) -> torch.dtype:
    return getattr(torch, f"int{int(bits)}")


def _library() -> Any:
    return imported(MODULE).IntxUnpackedToInt8Tensor


QUANTISER = Quantiser(
    name="torchao_intx",
    summary="torchao: Intx, symmetric groups of 64",
    pack=pack,
    restore=restore,
    widths=(8, 7, 6, 5, 4, 3, 2),
    library="torchao",
)
