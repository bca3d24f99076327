"""Options for dtype, quantisation and device of the weights, checked before torch is imported."""

from __future__ import annotations

import re

from moereplay.tracegen.errors import RecordError, require
from moereplay.traces.texts import hint

DTYPES = ("auto", "float32", "bfloat16", "float16")
#: What --quantise names, and the library that it needs beside accelerate.
QUANTISERS = {"bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes", "fp8": "accelerate"}

#: What torch calls devices of its own and of others' that compute.
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "xla", "mtia", "maia", "privateuseone")
NUMBERED = re.compile(r"([a-z]+)(:\d{1,3})?")


def check_device(device: str) -> None:
    """Raises RecordError for what is no name of a device; whether this machine has it, torch knows."""
    named = NUMBERED.fullmatch(device)
    if device != "auto" and not (named and named[1] in DEVICES):
        raise RecordError(f"--device {device!r}: torch has no such device here; try auto or cpu")


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
