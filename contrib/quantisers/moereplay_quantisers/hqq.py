"""HQQ: affine groups of 64 with a searched offset, so that a few large weights cost the others less precision.

Its `Quantizer` chooses values, scales and offsets; they are stored in our form, without gaps; its own form takes 3.2
bits for 3. Scales and offsets are float16, as in its layers. Restored by its formula, (value - offset) * scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moereplay.tracegen.precision.contract import Packed, Quantiser, imported
from moereplay.tracegen.precision.integers import GROUP, grouped, packed, ungrouped, unpacked


def pack(weight: Tensor, bits: float) -> Packed:
    """Return values, and scale and offset of each group (out, groups). Raises RecordError without the library."""
    library: Any = imported("hqq.core.quantize").Quantizer
    shape, groups = (weight.shape[0], weight.shape[1]), grouped(weight).float()
    values, meta = library.quantize(
        groups.flatten(1), nbits=int(bits), group_size=GROUP, axis=1, bitpack=False, device="cpu"
    )
    values = ungrouped(values.view(groups.shape).to(torch.uint8), shape)
    kept = {name: meta[name].view(groups.shape[:-1]).to(torch.float16).clone() for name in ("scale", "zero")}
    return Packed({"values": packed(values.flatten(), int(bits))} | kept, shape, bits)


def restore(kept: Packed, dtype: torch.dtype) -> Tensor:
    """Return (out, in) of `dtype`."""
    scale, zero = (kept.tensors[name].float()[..., None] for name in ("scale", "zero"))
    values = unpacked(kept.tensors["values"], int(kept.bits), kept.shape[0] * kept.shape[1])
    groups = grouped(values.view(kept.shape).float())
    return ungrouped((groups - zero) * scale, kept.shape).to(dtype)


QUANTISER = Quantiser(
    name="hqq",
    summary="HQQ: affine groups of 64 with searched offsets",
    pack=pack,
    restore=restore,
    widths=(8, 6, 5, 4, 3, 2, 1),
    keeps=True,
    library="hqq",
)
