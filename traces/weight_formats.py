"""Weight formats by their names in files and models, and the bits they store per weight, block scales included."""

from __future__ import annotations

import re

from moereplay.traces.texts import hint

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
#: Experts of checkpoints for other engines, with their scales.
CHECKPOINT_BITS = {
    "BF16": 16.0,
    "FP8": 8 + 32 / 128**2,  # a 32-bit scale per block of 128 x 128 (arXiv 2412.19437)
    "W8A8": 8.0,  # 8-bit integers with a scale for each row (llm-compressor), which is left out
    "MXFP4": BLOCKS["MXFP4"],
    "NVFP4": BLOCKS["NVFP4"],  # an 8-bit scale per 16 weights
    "INT4": 4 + 16 / 32,  # a 16-bit scale per group of 32 (config.json of Kimi-K2-Thinking)
    "AWQ": 4 + 20 / 128,  # a 16-bit scale and a 4-bit zero per group of 128
    "GPTQ": 4 + 20 / 128,  # likewise
}
#: What llama.cpp copies into another layout (repacks) on processors that gain by it (b11434, ggml-cpu/repack.cpp).
REPACKED = frozenset({"Q4_0", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q6_K"})
OF_EXPERTS = ("MXFP4", "NVFP4")  #: formats that models use for experts only
HEAD_BITS = 6.5625  #: of Q6_K's block
_NAMED = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(BITS_PER_WEIGHT, key=len, reverse=True))})(?![a-z0-9])", re.I)


def named_in(text: str) -> str | None:
    """Return the last weight format in the name of a model or file, such as `gemma-4-26B-Q4_K_M.gguf`, or None."""
    found = _NAMED.findall(text)
    return found[-1].upper() if found else None


def without_format(stem: str) -> str:
    """Return a file's name without the weight format and its variants at the end: `-Q4_K_M`, `.UD-Q4_K_XL`, `-bf16`."""
    return re.sub(r"[-._](UD[-_])?(I?Q\d\w*|(BF|F|FP)(16|32)|FP8|F8_E4M3|MXFP4(_MOE)?|NVFP4)$", "", stem, flags=re.I)


def is_number(text: str) -> bool:
    """Return True for a number of bits, such as 4.85; False for the name of a format."""
    return re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text) is not None


def bits_of(text: str) -> float:
    """Return the bits per weight of `4.85`, or of a format by name. Raises ValueError."""
    if is_number(text):
        return float(text)
    try:
        float(text)
    except ValueError:
        return BITS_PER_WEIGHT[check_format(text)]
    raise ValueError(f"invalid precision {text[:40]} bits: expected 0.1 to 64")


def dense_bits_of(name: str, layer_params: int, head_params: int) -> float | None:
    """Return the mean bits of dense weights in a file of that format; None for formats that only experts use.

    llama.cpp stores the head of a file below Q6_K in Q6_K (src/llama-quant.cpp); other dense weights are taken to have
    the mean of the format. MXFP4 and NVFP4 checkpoints keep their dense weights in 16 bits.
    """
    if name in OF_EXPERTS:
        return None
    bits = BITS_PER_WEIGHT[name]
    total = layer_params + head_params
    return (layer_params * bits + head_params * max(bits, HEAD_BITS)) / total if total else bits


def check_format(name: str) -> str:
    """Return a weight format in its standard spelling, ignoring case. Raises ValueError naming a similar one."""
    if name.upper() not in BITS_PER_WEIGHT:
        raise ValueError(f"unknown weight format {name[:60]!r}; {hint(name.upper(), list(BITS_PER_WEIGHT))}")
    return name.upper()
