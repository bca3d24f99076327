"""torchao: affine groups of 64 whose offset is an integer, by its primitives.

They choose scales, offsets and values; these are stored without gaps, and torchao restores from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moereplay.tracegen.precision.contract import Packed, Quantiser, imported
from moereplay.tracegen.precision.integers import GROUP, grouped, packed, ungrouped, unpacked

BLOCK = (1, GROUP)


def pack(weight: Tensor, bits: float) -> Packed:
    """Return values, and scale and offset of each group (out, groups). Raises RecordError without the library."""
    library, last = _library(), 2 ** int(bits) - 1
    shape, flat = (weight.shape[0], weight.shape[1]), grouped(weight).float().flatten(1)
    how = library.MappingType.ASYMMETRIC, BLOCK, torch.uint8, 0, last
    scale, zero = library.choose_qparams_affine(flat, *how, zero_point_dtype=torch.uint8, keepdim=True)
    values = library.quantize_affine(flat, BLOCK, scale, zero, torch.uint8, 0, last)[:, : shape[1]]
    kept = {"scale": scale.view(shape[0], -1), "zero": zero.view(shape[0], -1)}
    return Packed({"values": packed(values.flatten(), int(bits))} | kept, shape, bits)


def restore(kept: Packed, dtype: torch.dtype) -> Tensor:
    """Return (out, in) of `dtype`."""
    count, last = kept.shape[0] * kept.shape[1], 2 ** int(kept.bits) - 1
    values = unpacked(kept.tensors["values"], int(kept.bits), count)
    groups, scale, zero = grouped(values.view(kept.shape)), kept.tensors["scale"], kept.tensors["zero"]
    flat = _library().dequantize_affine(groups.flatten(1), BLOCK, scale, zero, torch.uint8, 0, last)
    return ungrouped(flat.unflatten(-1, (-1, GROUP)), kept.shape).to(dtype)


def _library() -> Any:
    return imported("torchao.quantization.quant_primitives")


QUANTISER = Quantiser(
    name="torchao",
    summary="torchao: affine groups of 64 with an integer offset",
    pack=pack,
    restore=restore,
    widths=(8, 7, 6, 5, 4, 3, 2),
    library="torchao",
)
