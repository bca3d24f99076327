"""Arrays of counts: (layers, experts), or MoE-Infinity's activation matrices, (sequences, layers, experts).

MoE-Infinity saves the choices of each sequence as a float array in .npy; rows of zeros are unused. Layers of
an encoder come before those of its decoder. Source: EfficientMoE/MoE-Infinity, moe_infinity/memory/expert_tracer.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.profiles.contract import Counts, Form, checked
from moereplay.traces.schema import TraceError, shown


def sniff(path: Path) -> bool:
    """Recognise an npy file of two axes, or of three axes of floats; integers of three axes are expert ids."""
    shape, kind = archive.described(path) if path.is_file() and path.suffix == ".npy" else ((), "")
    return (len(shape) == 3 and kind == "f") or (len(shape) == 2 and kind in ("f", "i", "u"))


def read(path: Path) -> Counts:
    """Add up the choices of all sequences. Raises TraceError for an array that cannot be counts."""
    found = archive.lone(path)
    if found.ndim not in (2, 3) or found.dtype.kind not in "fiu" or not found.size:
        expected = "expected (sequences, layers, experts) or (layers, experts)"
        raise TraceError(f"{path}: invalid array {shown(found.dtype)}{found.shape}: {expected}")
    if found.ndim == 2:
        return checked(path, found, ("axes are (layer, expert)", *_doubts(found)))
    if not np.isfinite(found).all() or found.min() < 0:
        raise TraceError(f"{path}: invalid counts: expected integers of at least 0")
    used = int(found.any((1, 2)).sum())
    note = f"axes are (sequence, layer, expert): the sum of {used:,} sequences; {len(found) - used:,} entries are empty"
    return checked(path, found.sum(0, dtype=np.float64), (note,))


def _doubts(counts: np.ndarray) -> list[str]:
    """Return a warning about integers that may be ids: counts of one run add up to the same number in every layer."""
    if counts.dtype.kind == "f" or len(set(counts.sum(1).tolist())) <= 1 or counts.max() >= counts.shape[1]:
        return []
    return ["layers have different sums: if these are ids of one expert each, save them as (tokens, layers, 1)"]


FORM = Form(
    name="activation_matrix",
    summary="activation matrices of MoE-Infinity per sequence, or counts by layer and expert",
    formats="FILE.npy of (sequences, layers, experts) with fractions, or of (layers, experts)",
    sniff=sniff,
    read=read,
)
