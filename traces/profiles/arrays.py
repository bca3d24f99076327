"""Counts in arrays: importance matrices of llama.cpp in GGUF, arrays of numpy, archives of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from moereplay.traces.checkpoints.gguf import Gguf, is_gguf, read_gguf
from moereplay.traces.importers import archive
from moereplay.traces.importers.by_request import moe_layers
from moereplay.traces.profiles.contract import Counts, Form, check_size, checked, same_shape
from moereplay.traces.schema import TraceError, shown

# -- Importance matrices of llama.cpp (`llama-imatrix`) in GGUF: the tokens of each expert.
# -- `blk.N.ffn_{gate,up,down}_exps.weight.counts` is float32 with an element per expert; gate, up and down of a layer
# -- have the same counts. Source: ggml-org/llama.cpp tools/imatrix/imatrix.cpp. Matrices of the older `.dat` form, and
# -- those converted from it, hold one count per tensor and none per expert.

TENSORS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
ORDER = ("gate", "gate_up", "up", "down")  #: whose counts are taken, if they differ
KIND = "general.type"


def sniff_imatrix(path: Path) -> bool:
    """Recognise any GGUF file, so that `read` can reject other kinds with a reason."""
    return path.is_file() and is_gguf(path)


def read_imatrix(path: Path) -> Counts:
    """Read the tokens of each expert. Raises TraceError for a GGUF file without counts of experts."""
    gguf = read_gguf(path)
    if gguf.metadata.get(KIND) != "imatrix":
        is_kind = f"{KIND} is {shown(gguf.metadata.get(KIND))}"
        raise TraceError(
            f"{path}: {is_kind}: expected imatrix, as written by llama-imatrix; weights do not count experts"
        )
    layers = _imatrix_layers(gguf)
    if not layers:
        raise TraceError(f"{path}: missing counts of blk.N.ffn_*_exps: expected those of a Mixture-of-Experts model")
    experts = {len(found) for found in layers.values()}
    if experts == {1}:
        raise TraceError(f"{path}: counts per tensor, not per expert, as in the .dat form; run llama-imatrix again")
    if len(experts) > 1:
        raise TraceError(
            f"{path}: layers of {' and '.join(map(str, sorted(experts)))} experts: expected the same number in each"
        )
    _, said = moe_layers(np.array(list(layers)))
    return checked(path, np.stack(list(layers.values())), (*_imatrix_notes(gguf, len(layers)), *said))


def _imatrix_layers(gguf: Gguf) -> dict[int, np.ndarray]:
    """Return (E,) counts by layer, ascending. Raises TraceError if two tensors of one layer disagree."""
    names = sorted(
        (int(found[1]), ORDER.index(found[2]), name) for name in gguf.tensors if (found := TENSORS.fullmatch(name))
    )
    layers: dict[int, np.ndarray] = {}
    widest = max((math.prod(gguf.tensors[name].shape) for _, _, name in names), default=1)
    check_size(gguf.path, len({layer for layer, _, _ in names}) or 1, widest)
    for layer, _, name in names:
        counts = gguf.floats(name).ravel()
        if layer in layers and not np.array_equal(layers[layer], counts):
            raise TraceError(f"{gguf.path}: {name} differs from the layer's other tensors: expected equal counts")
        layers.setdefault(layer, counts)
    return layers


def _imatrix_notes(gguf: Gguf, layers: int) -> tuple[str, ...]:
    chunks, tokens = (gguf.metadata.get(f"imatrix.chunk_{key}") for key in ("count", "size"))
    said = f"tokens per expert of {layers} layers, an importance matrix of llama.cpp"
    if isinstance(chunks, int) and isinstance(tokens, int):
        said += f" over {chunks:,} chunks of {tokens:,} tokens"
    return (said,)


IMATRIX = Form(
    name="imatrix",
    summary="importance matrix of llama.cpp: tokens of each expert",
    formats="FILE.gguf of llama-imatrix, with blk.N.ffn_*_exps.weight.counts",
    sniff=sniff_imatrix,
    read=read_imatrix,
)


# -- Arrays of counts: (layers, experts), or MoE-Infinity's activation matrices, (sequences, layers, experts).
# -- MoE-Infinity saves the choices of each sequence as a float array in .npy; rows of zeros are unused. Layers of an
# -- encoder come before those of its decoder. Source: EfficientMoE/MoE-Infinity, moe_infinity/memory/expert_tracer.py.


def sniff_activation_matrix(path: Path) -> bool:
    """Recognise an npy file of two axes, or of three axes of floats; integers of three axes are expert ids."""
    shape, kind = archive.described(path) if path.is_file() and path.suffix == ".npy" else ((), "")
    return (len(shape) == 3 and kind == "f") or (len(shape) == 2 and kind in ("f", "i", "u"))


def read_activation_matrix(path: Path) -> Counts:
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


ACTIVATION_MATRIX = Form(
    name="activation_matrix",
    summary="activation matrices of MoE-Infinity per sequence, or counts by layer and expert",
    formats="FILE.npy of (sequences, layers, experts) with fractions, or of (layers, experts)",
    sniff=sniff_activation_matrix,
    read=read_activation_matrix,
)


# -- Counts in an npz archive, of several models and texts: arrays `MODEL/TEXTS/counts`, (layers, experts), or `counts`.
# -- OLMoE publishes such counts, of three layers that its script chooses: 0, 7 and 15. Source: allenai/OLMoE,
# -- scripts/run_routing_analysis.py, whose pickled Counters are the rows. Other arrays, such as its counts of two
# -- layers at once or of the best expert only, are read if they are named and have two axes.

SUFFIX, COUNTS = ".npz", "counts"
PARTS = 3  #: of a published name: model, texts, counts
PUBLISHED = (0, 7, 15)  #: layers that OLMoE's script counts
ROOM = 400  #: characters of a list of names
THREE = "assumed: the rows are layers 0, 7 and 15 of the model, as OLMoE counts; experts of other layers have no rank"


def sniff_count_archive(path: Path) -> bool:
    """Recognise an npz with an array called counts, with or without a model's name before it."""
    return path.is_file() and path.suffix == SUFFIX and bool(_ours(archive.members(path)))


def read_count_archive(path: Path, named: str | None = None) -> Counts:
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
    if len(total) != len(PUBLISHED) or any(len(name.split("/")) != PARTS for name in names):
        return counts
    layers = tuple(layer for layer, row in zip(PUBLISHED, total, strict=True) if row.any())
    return replace(counts, layers=layers, notes=(*counts.notes, THREE))


def _ours(names: frozenset[str]) -> list[str]:
    return sorted(name for name in names if name.rsplit("/", 1)[-1] == COUNTS)


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
        listed = _listed([f"{model} ({count} arrays)" for model, count in models.items()])
        one, array = shown(_model(ours[0])), shown(ours[0])
        fix = f"add --columns counts={one} for the sum of a model's, or counts={array} for an array"
        raise TraceError(f"{path}: it holds counts of {len(models)} models: {listed}; {fix}")
    return ours


def _listed(names: list[str]) -> str:
    """Return the names that fit in one line."""
    kept = [name for name, end in zip(names, accumulate(len(name) + 2 for name in names), strict=True) if end <= ROOM]
    return shown(", ".join(kept), ROOM) + (", ..." if len(kept) < len(names) else "")


def _counts(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:
        expected = "expected (layers, experts); an array of ids is read with --columns experts=NAME"
        raise TraceError(f"{path}: {shown(name)} is {shown(array.dtype)}{array.shape}; {expected}")
    return array


COUNT_ARCHIVE = Form(
    name="count_archive",
    summary="counts of one or several models in an archive, such as OLMoE's of layers 0, 7 and 15",
    formats="FILE.npz with counts or MODEL/TEXTS/counts (layers, experts); of several with --columns counts=MODEL",
    sniff=sniff_count_archive,
    read=read_count_archive,
    named=True,
)
