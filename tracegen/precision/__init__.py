"""Quantisers: one file each that packs a weight into few bits and restores it. Importable without torch.

Ours is here; another is an entry point `NAME = package.module:QUANTISER` of the group `moereplay.quantisers` in an
installed package, such as that of contrib/quantisers. `best` is not a quantiser but the one measured best at a width.
"""

from __future__ import annotations

from collections.abc import Mapping

from moereplay.tracegen.errors import RecordError
from moereplay.traces.files import install_contrib
from moereplay.traces.plugins import plugins
from moereplay.traces.texts import hint

GROUP = "moereplay.quantisers"
DEFAULT = "affine"  #: the only one in this folder
#: Those of contrib/quantisers, a distribution of its own.
CONTRIB = ("hqq", "bitsandbytes", "bitsandbytes_fp4", "torchao", "torchao_intx")
CHOOSING = "best"
#: Bits to the quantiser with the least error of an expert's output, for no more bytes than ours. docs/precision.md has
#: the figures: 4 to 5 % less than ours, and up to 17 % less KL of the miniature; at 8 bits the KL is the same.
BEST: Mapping[float, str] = {8: "hqq", 4: "hqq", 3: "hqq", 2: "hqq"}


def check_quantiser(name: str) -> None:
    """Raises RecordError for an unknown name, or one whose package is not installed."""
    for chosen in sorted(set(BEST.values())) if name == CHOOSING else (name,):
        if chosen == DEFAULT or chosen in plugins(GROUP):
            continue
        if chosen in CONTRIB:
            fix = f"{install_contrib('quantisers')}, or take {DEFAULT}"
            raise RecordError(f"quantiser {name} requires moereplay-quantisers: {fix}")
        every = dict.fromkeys((DEFAULT, *CONTRIB, *plugins(GROUP), CHOOSING))
        raise RecordError(f"unknown quantiser {name!r}: {hint(name, every)}")


def at_width(name: str, bits: float) -> str:
    """Return the name of the quantiser that `name` selects at `bits`."""
    return BEST.get(bits, DEFAULT) if name == CHOOSING else name
