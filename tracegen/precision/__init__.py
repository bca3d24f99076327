"""Quantisers: one file each that packs a weight into few bits and restores it. Importable without torch.

Adding one is a file here that ends in `QUANTISER = Quantiser(...)`, and its name below. `best` is not a file but the
one measured best at a width (`BEST`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from moereplay.tracegen.errors import RecordError
from moereplay.traces.files import install_command
from moereplay.traces.texts import hint

#: Each with the library that it needs.
NAMES: Mapping[str, str | None] = {
    "affine": None,
    "hqq": "hqq",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_fp4": "bitsandbytes",
    "torchao": "torchao",
    "torchao_intx": "torchao",
}
DEFAULT = "affine"
CHOOSING = "best"
#: Bits to the quantiser with the least error of an expert's output, for no more bytes than ours. docs/precision.md has
#: the figures: 4 to 5 % less than ours, and up to 17 % less KL of the miniature; at 8 bits the KL is the same.
BEST: Mapping[float, str] = {8: "hqq", 4: "hqq", 3: "hqq", 2: "hqq"}


def check_quantiser(name: str) -> None:
    """Raises RecordError for an unknown name, or one whose library is not installed."""
    if name not in (*NAMES, CHOOSING):
        raise RecordError(f"unknown quantiser {name!r}: {hint(name, (*NAMES, CHOOSING))}")
    for each in sorted(set(BEST.values())) if name == CHOOSING else (name,):
        library = NAMES[each]
        if library is not None and not find_spec(library):
            fix = f"{install_command('quant')}, or take {DEFAULT}"
            raise RecordError(f"quantiser {name} requires {library}: {fix}")


def at_width(name: str, bits: float) -> str:
    """Return the name of the quantiser that `name` selects at `bits`."""
    return BEST.get(bits, DEFAULT) if name == CHOOSING else name
