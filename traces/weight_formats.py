"""Weight formats as files and models name them, and how many bits they store per weight, block scales included."""

from __future__ import annotations

import re

from traces.spelling import hint

#: Blocks of one format: bytes of a block over its weights (ggml's block structures; OCP MX 1.0 for MXFP4).
BLOCKS = {
    "F32": 32.0,
    **dict.fromkeys(("F16", "FP16", "BF16"), 16.0),
    **dict.fromkeys(("FP8", "F8_E4M3"), 8.0),
    "Q8_0": 8.5,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "MXFP4": 4.25,
    "NVFP4": 4.5,
    "IQ4_XS": 4.25,
    "IQ4_NL": 4.5,
    "IQ3_S": 3.4375,
    "IQ3_XXS": 3.0625,
    "IQ2_S": 2.5625,
    "IQ2_XS": 2.3125,
    "IQ2_XXS": 2.0625,
    "IQ1_M": 1.75,
    "IQ1_S": 1.5625,
}
#: Mixtures: the mean over a model's weights (llama.cpp, examples/quantize/README.md, Llama 2 7B).
MIXTURES = {
    "Q6_K": 6.56,
    "Q5_K_M": 5.68,
    "Q5_K_S": 5.52,
    "Q4_K_M": 4.84,
    "Q4_K_S": 4.58,
    "Q3_K_L": 4.27,
    "Q3_K_M": 3.91,
    "Q3_K_S": 3.5,
    "Q2_K": 3.35,
}
BITS_PER_WEIGHT = BLOCKS | MIXTURES
_NAMED = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(BITS_PER_WEIGHT, key=len, reverse=True))})(?![a-z0-9])", re.I)


def named_in(text: str) -> str | None:
    """The weight format that a model's or file's name ends its description with, as in `gemma-4-26B-Q4_K_M.gguf`."""
    found = _NAMED.findall(text)
    return found[-1].upper() if found else None


def check_format(name: str) -> str:
    """A weight format as it is spelt here, whatever the case. Raises ValueError naming the nearest."""
    if name.upper() not in BITS_PER_WEIGHT:
        raise ValueError(f"no weight format {name[:60]!r} is known: {hint(name.upper(), list(BITS_PER_WEIGHT))}")
    return name.upper()
