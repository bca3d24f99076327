"""Counts in an npz archive, of several models and texts: arrays `MODEL/TEXTS/counts`, (layers, experts), or `counts`.

OLMoE publishes such counts, of three layers that its script chooses: 0, 7 and 15. Source: allenai/OLMoE,
scripts/run_routing_analysis.py, whose pickled Counters are the rows. Other arrays, such as its counts of two
layers at once or of the best expert only, are read if they are named and have two axes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.profiles.contract import Counts, Form, checked, same_shape
from moereplay.traces.schema import TraceError, shown

SUFFIX, COUNTS = ".npz", "counts"
PARTS = 3  #: of a published name: model, texts, counts
PUBLISHED = (0, 7, 15)  #: layers that OLMoE's script counts
ROOM = 400  #: characters of a list of names
THREE = "assumed: the rows are layers 0, 7 and 15 of the model, as OLMoE counts; experts of other layers have no rank"


def sniff(path: Path) -> bool:
    """Recognise an npz with an array called counts, with or without a model's name before it."""
    return path.is_file() and path.suffix == SUFFIX and bool(_ours(archive.members(path)))


def read(path: Path, named: str | None = None) -> Counts:
    """Read the named array, or the sum of all arrays of the named model, or of the only model.

    Raises TraceError naming the arrays there are.
    """
    found = archive.members(path) if path.is_file() else frozenset()
    names = _chosen(path, found, named)
    arrays = [_counts(path, name, array) for name, array in zip(names, archive.arrays(path, *names), strict=True)]
    total = np.stack(same_shape(path, names, arrays)).sum(0, dtype=np.float64)
    whose = shown(names[0] if len(names) == 1 else named or _model(names[0]))
    how = f"the sum of {len(names)} arrays" if len(names) > 1 else "an array"
    counts = checked(path, total, (f"counts of {whose}, {how}",))
    if len(total) != len(PUBLISHED) or not all(map(_published, names)):
        return counts
    layers = tuple(layer for layer, row in zip(PUBLISHED, total, strict=True) if row.any())
    return replace(counts, layers=layers, notes=(*counts.notes, THREE))


def _ours(names: frozenset[str]) -> list[str]:
    return sorted(name for name in names if name.rsplit("/", 1)[-1] == COUNTS)


def _published(name: str) -> bool:
    return len(name.split("/")) == PARTS


def _model(name: str) -> str:
    return name.split("/")[0]


def _chosen(path: Path, found: frozenset[str], named: str | None) -> list[str]:
    """Return the names of the arrays to add up. Raises TraceError if there is none, or if models are ambiguous."""
    if named in found:
        return [named]
    ours = [name for name in _ours(found) if named is None or name.startswith(f"{named}/")]
    if not ours:
        wrong = f"missing counts {shown(named)}" if named else f"missing array {COUNTS}"
        listed = _listed(_ours(found) or sorted(found)) or "none"
        raise TraceError(f"{path}: {wrong}; found {listed}: pass one with --columns counts=NAME")
    models = Counter(map(_model, ours))
    if len(models) > 1:
        raise TraceError(f"{path}: {_ambiguous(ours, models)}")
    return ours


def _ambiguous(ours: list[str], models: Counter[str]) -> str:
    """Return in words which models there are and what to type."""
    listed = _listed([f"{model} ({count} arrays)" for model, count in models.items()])
    one, array = shown(_model(ours[0])), shown(ours[0])
    fix = f"add --columns counts={one} for the sum of a model's, or counts={array} for an array"
    return f"it holds counts of {len(models)} models: {listed}; {fix}"


def _listed(names: list[str]) -> str:
    """Return the names that fit in one line."""
    kept = [name for name, end in zip(names, accumulate(len(name) + 2 for name in names), strict=True) if end <= ROOM]
    return shown(", ".join(kept), ROOM) + (", ..." if len(kept) < len(names) else "")


def _counts(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:
        expected = "expected (layers, experts); an array of ids is read with --columns experts=NAME"
        raise TraceError(f"{path}: {shown(name)} is {shown(array.dtype)}{array.shape}; {expected}")
    return array


FORM = Form(
    name="count_archive",
    summary="counts of one or several models in an archive, such as OLMoE's of layers 0, 7 and 15",
    formats="FILE.npz with counts or MODEL/TEXTS/counts (layers, experts); of several with --columns counts=MODEL",
    sniff=sniff,
    read=read,
    named=True,
)
