"""Options for dtype, quantisation and device of the weights, checked before torch is imported."""

from __future__ import annotations

from tracegen.errors import RecordError
from tracegen.requirements import require
from traces.spelling import hint

DTYPES = ("auto", "float32", "bfloat16", "float16")
#: What --quantise names, and the library that it needs beside accelerate.
QUANTISERS = {"bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes", "fp8": "accelerate"}


def check_placement(dtype: str = "auto", device_map: str | None = None, quantise: str | None = None) -> None:
    """Raises RecordError for an unknown dtype or quantiser, or naming the library that is not installed."""
    if dtype not in DTYPES:
        raise RecordError(f"--dtype {dtype!r} is unknown: {hint(dtype, DTYPES)}")
    if quantise is not None:
        if quantise not in QUANTISERS:
            raise RecordError(f"--quantise {quantise!r} is unknown: {hint(quantise, QUANTISERS)}")
        require(QUANTISERS[quantise], f"--quantise {quantise}")
        require("accelerate", f"--quantise {quantise}")
    elif device_map is not None:
        require("accelerate", f"--device-map {device_map}")
