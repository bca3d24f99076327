"""Importance matrices of llama.cpp (`llama-imatrix`) in GGUF: the tokens of each expert.

`blk.N.ffn_{gate,up,down}_exps.weight.counts` is float32 with an element per expert; gate, up and down of a layer have
the same counts. Source: ggml-org/llama.cpp tools/imatrix/imatrix.cpp. Matrices of the older `.dat` form, and those
converted from it, hold one count per tensor and none per expert.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from moereplay.traces.checkpoints.gguf import Gguf, is_gguf, read_gguf
from moereplay.traces.importers.by_request import moe_layers
from moereplay.traces.profiles.contract import Counts, Form, check_size, checked
from moereplay.traces.schema import TraceError, shown

COUNTS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
ORDER = ("gate", "gate_up", "up", "down")  #: whose counts are taken, if they differ
KIND = "general.type"


def sniff(path: Path) -> bool:
    """Recognise any GGUF file, so that `read` can reject other kinds with a reason."""
    return path.is_file() and is_gguf(path)


def read(path: Path) -> Counts:
    """Read the tokens of each expert. Raises TraceError for a GGUF file without counts of experts."""
    gguf = read_gguf(path)
    if gguf.metadata.get(KIND) != "imatrix":
        is_kind = f"{KIND} is {shown(gguf.metadata.get(KIND))}"
        raise TraceError(
            f"{path}: {is_kind}: expected imatrix, as written by llama-imatrix; weights do not count experts"
        )
    layers = _layers(gguf)
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
    return checked(path, np.stack(list(layers.values())), (*_notes(gguf, len(layers)), *said))


def _layers(gguf: Gguf) -> dict[int, np.ndarray]:
    """Return (E,) counts by layer, ascending. Raises TraceError if two tensors of one layer disagree."""
    names = sorted(
        (int(found[1]), ORDER.index(found[2]), name) for name in gguf.tensors if (found := COUNTS.fullmatch(name))
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


def _notes(gguf: Gguf, layers: int) -> tuple[str, ...]:
    chunks, tokens = (gguf.metadata.get(f"imatrix.chunk_{key}") for key in ("count", "size"))
    said = f"tokens per expert of {layers} layers, an importance matrix of llama.cpp"
    if isinstance(chunks, int) and isinstance(tokens, int):
        said += f" over {chunks:,} chunks of {tokens:,} tokens"
    return (said,)


FORM = Form(
    name="imatrix",
    summary="importance matrix of llama.cpp: tokens of each expert",
    formats="FILE.gguf of llama-imatrix, with blk.N.ffn_*_exps.weight.counts",
    sniff=sniff,
    read=read,
)
