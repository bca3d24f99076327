"""bitsandbytes' other 16 values for 4 bits: floating-point numbers (FP4)."""

from __future__ import annotations

from moereplay_quantisers.bitsandbytes import quantiser

QUANTISER = quantiser("bitsandbytes_fp4", "fp4", "bitsandbytes: FP4 by blocks of 64", (4,))
