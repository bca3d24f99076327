"""bitsandbytes: 16 values for 4 bits, spaced as normal weights are (NF4), and 256 for 8 bits, scaled by blocks of 64.

Packed and restored by the library itself, as rows of one block: blocks run on from row to row of the weight, and if
rows are not whole blocks, its kernel for CPUs (0.50.2) takes other blocks' scales.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from moereplay.tracegen.precision.contract import Packed, Quantiser, imported

BLOCK = 64
EIGHT = 8


def pack(kind: str, weight: Tensor, bits: float) -> Packed:
    """Return values, and the greatest magnitude of each block; `kind` of 4 bits is nf4 or fp4. Raises RecordError."""
    library: Any = imported("bitsandbytes.functional")
    blocks = padded(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    if bits == EIGHT:
        values, state = library.quantize_blockwise(blocks, blocksize=BLOCK)
    else:
        values, state = library.quantize_4bit(blocks, blocksize=BLOCK, quant_type=kind)
    return Packed({"values": values, "largest": state.absmax}, (weight.shape[0], weight.shape[1]), bits)


def restore(kind: str, kept: Packed, dtype: torch.dtype) -> Tensor:
    """Return (out, in) of `dtype`."""
    library: Any = imported("bitsandbytes.functional")
    values, largest = kept.tensors["values"], kept.tensors["largest"]
    if kept.bits == EIGHT:
        code = library.create_dynamic_map()
        state = library.QuantState(largest, code=code, blocksize=BLOCK, dtype=dtype)
        blocks = library.dequantize_blockwise(values, state)
    else:
        state = library.QuantState(largest, (len(largest), BLOCK), blocksize=BLOCK, quant_type=kind, dtype=dtype)
        blocks = library.dequantize_4bit(values, state)
    return blocks.flatten()[: kept.shape[0] * kept.shape[1]].view(kept.shape)


def quantiser(name: str, kind: str, summary: str, widths: tuple[int, ...]) -> Quantiser:
    """Return a quantiser of one of the library's 4-bit kinds."""
    how = partial(pack, kind), partial(restore, kind)
    return Quantiser(name, summary, *how, widths, library="bitsandbytes")


QUANTISER = quantiser("bitsandbytes", "nf4", "bitsandbytes: NF4, and 8 bits by blocks of 64", (8, 4))
