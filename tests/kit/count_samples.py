"""A sample of every form of counts, written from its source's layout, and what it must give."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, EXPERTS = 3, 8


def count(layer: int, expert: int) -> int:
    """How often an expert was chosen; two of every layer never were, and layers have equal sums."""
    return max(0, (3 * (expert + layer)) % EXPERTS * 5 - 5)


COUNTS = np.array([[count(layer, expert) for expert in range(EXPERTS)] for layer in range(LAYERS)])
#: The ranking, by sorting in plain Python.
RANKING = sorted(
    [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS) if count(layer, expert)],
    key=lambda place: (-count(*place), place),
)
FIRST = 1  #: the model's number of its first MoE layer
NUMBERED = "layers 1..3 of the file are MoE layers 0..2"


# ---------------------------------------------------------------- GGUF

Metadata = dict[str, Any]  #: texts, numbers, and lists of one kind of them


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_kind(value: object) -> tuple[int, str]:
    """GGUF's number of a kind, and how `struct` writes it."""
    if isinstance(value, str):
        return 8, ""
    if isinstance(value, bool):
        return 7, "?"
    if isinstance(value, float):
        return 12, "d"
    assert isinstance(value, int)
    return (5, "i") if -(1 << 31) <= value < 0 else (4, "I") if 0 <= value < 1 << 32 else (11, "q")


def _gguf_cell(value: Any) -> bytes:
    return _gguf_text(value) if isinstance(value, str) else struct.pack(f"<{_gguf_kind(value)[1]}", value)


def _gguf_value(value: Any) -> bytes:
    if not isinstance(value, list):
        return struct.pack("<I", _gguf_kind(value)[0]) + _gguf_cell(value)
    kind = _gguf_kind(value[0])[0] if value else 4
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(_gguf_cell, value))


def gguf(metadata: Metadata, tensors: dict[str, np.ndarray], alignment: int = 32) -> bytes:
    """A file of version 3 as docs/gguf.md of ggml has it: float32 tensors, axes from the fastest to the slowest."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_gguf_text(key) + _gguf_value(value) for key, value in metadata.items())
    data = b""
    for name, values in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        axes = struct.pack(f"<I{values.ndim}Q", values.ndim, *reversed(values.shape))
        head += _gguf_text(name) + axes + struct.pack("<IQ", 0, len(data))
        data += values.astype("<f4").tobytes()
    return head + b"\0" * (-len(head) % alignment) + data


def gguf_header(metadata: Metadata, tensors: Mapping[str, tuple[tuple[int, ...], int]]) -> bytes:
    """A file's beginning: tensors of (axes from the fastest on, type), and none of their data."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_gguf_text(key) + _gguf_value(value) for key, value in metadata.items())
    for name, (axes, kind) in tensors.items():
        head += _gguf_text(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes) + struct.pack("<IQ", kind, 0)
    return head + b"\0" * (-len(head) % 32)


IMATRIX: Metadata = {
    "general.type": "imatrix",
    "imatrix.datasets": ["calibration.txt"],
    "imatrix.chunk_count": 12,
    "imatrix.chunk_size": 512,
}


def imatrix_tensors() -> dict[str, np.ndarray]:
    """Sums and counts of a layer's three fused matrices, and of one that has no experts."""
    tensors = {"blk.0.attn_q.weight.in_sum2": np.ones((1, 4)), "blk.0.attn_q.weight.counts": np.array([[6144.0]])}
    for layer in range(LAYERS):
        for matrix in ("gate", "up", "down"):
            name = f"blk.{FIRST + layer}.ffn_{matrix}_exps.weight"
            tensors[f"{name}.in_sum2"] = np.full((EXPERTS, 4), 0.5)
            tensors[f"{name}.counts"] = COUNTS[layer][:, None].astype(float)
    return tensors


def write_imatrix(file: Path) -> None:
    """Twelve chunks."""
    file.write_bytes(gguf(IMATRIX, imatrix_tensors()))


# ---------------------------------------------------------------- the others


def write_coli_usage(file: Path) -> None:
    """Sparse, with sizes and the engine olmoe; layer 4 is for the prediction of several tokens and was never used."""
    rows = [
        f"{FIRST + layer} {expert} {count(layer, expert)}"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        if count(layer, expert)
    ]
    file.write_text("".join(f"{row}\n" for row in ["-1 4 8", "-2 1 3841822045", *rows]))


def write_inkling(file: Path) -> None:
    """All of them, after a row of a dense layer."""
    counts = np.concatenate([np.zeros((FIRST, EXPERTS)), COUNTS])
    file.write_bytes(b"IKU1" + struct.pack("<II", *counts.shape) + counts.astype("<u4").tobytes())


def write_matrices(file: Path) -> None:
    """Two sequences and a free place."""
    first = np.minimum(COUNTS, 4)
    np.save(file, np.stack([first, np.zeros_like(COUNTS), COUNTS - first]).astype(np.float32))


def write_array(file: Path) -> None:
    """Whole numbers."""
    np.save(file, COUNTS)


def write_hot_cache(file: Path) -> None:
    """One layer's choices together, those of the others by where they were."""
    pairs = [[[expert, count(layer, expert)] for expert in range(EXPERTS)] for layer in range(LAYERS)]
    layers = [{"layer": FIRST, "calls": 4, "experts": pairs[0], "hot_experts": [], "cold_experts": []}]
    layers += [
        {"layer": FIRST + layer, "calls": 4, "hot_experts": pairs[layer][:3], "cold_experts": pairs[layer][3:]}
        for layer in range(1, LAYERS)
    ]
    report = {"enabled": True, "schema": "llama.cpp.moe_layer_opt_perf.v1", "n_expert": EXPERTS, "layers": layers}
    file.write_text(json.dumps(report) + "\n")


def write_ranks(folder: Path) -> None:
    """Two ranks, each with half of every count."""
    folder.mkdir()
    places = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    for rank in range(2):
        rows = [f"{FIRST + layer},{expert},{(count(layer, expert) + rank) // 2}" for layer, expert in places]
        (folder / f"rank_{rank}.csv").write_text("\n".join(["layer_id,expert_id,count", *rows]) + "\n")


def write_archive(file: Path) -> None:
    """A program's counts beside something else."""
    np.savez(file, counts=COUNTS, bins=np.arange(4))


def write_published(file: Path) -> None:
    """A model's counts of two texts as OLMoE publishes them, and of the best expert alone."""
    first = np.minimum(COUNTS, 4)
    named = {"mine/a/counts": first, "mine/b/counts": COUNTS - first, "mine/a/counts_top1": first}
    np.savez(file, **named)  # type: ignore[arg-type]


def write_models(file: Path) -> None:
    """Two models, the second of other sizes."""
    named = {
        "mine/a/counts": COUNTS,
        "other/a/counts": np.ones((LAYERS, 4), int),
        "mine/a/cross": np.ones((2, 8, 8), int),
    }
    np.savez(file, **named)  # type: ignore[arg-type]


def write_map(file: Path) -> None:
    """All counts in one document, of layers 1 to 3."""
    file.write_text(json.dumps({"layers": {str(FIRST + at): {"hits": row} for at, row in enumerate(COUNTS.tolist())}}))


def write_maps(file: Path) -> None:
    """The counts of two domains, which add up."""
    first = COUNTS // 2
    lines = [
        {"domain": name, "layers": {str(FIRST + at): {"hits": row} for at, row in enumerate(part.tolist())}}
        for name, part in (("code", first), ("law", COUNTS - first))
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@dataclass(frozen=True)
class CountSample:
    """One form's sample; its counts are COUNTS, of these layers."""

    form: str
    name: str
    write: Callable[[Path], None]
    notes: tuple[str, ...]
    layers: tuple[int, ...] = tuple(range(LAYERS))

    @property
    def ranking(self) -> list[tuple[int, int]]:
        return [(self.layers[layer], expert) for layer, expert in RANKING]


ALL = [
    CountSample(
        "imatrix",
        "imatrix.gguf",
        write_imatrix,
        (
            "tokens per expert of 3 layers, an importance matrix of llama.cpp over 12 chunks of 512 tokens",
            NUMBERED,
        ),
    ),
    CountSample("coli_usage", "m.coli_usage", write_coli_usage, ("written by colibri's engine olmoe", NUMBERED)),
    CountSample(
        "coli_usage",
        "inkling.coli_usage",
        write_inkling,
        ("written by colibri's engine inkling", "1 layers without choices left out: dense"),
    ),
    CountSample(
        "activation_matrix",
        "eamc.npy",
        write_matrices,
        ("axes are (sequence, layer, expert): the sum of 2 sequences; 1 entries are empty",),
    ),
    CountSample("activation_matrix", "counts.npy", write_array, ("axes are (layer, expert)",)),
    CountSample("hot_cache", "hot.json", write_hot_cache, (NUMBERED,)),
    CountSample("activation_map", "map.json", write_map, (NUMBERED,)),
    CountSample("activation_map", "map.jsonl", write_maps, ("the sum of 2 maps, of code, law", NUMBERED)),
    CountSample("count_table", "ranks", write_ranks, ("the sum of 2 files", "experts = the highest id + 1", NUMBERED)),
    CountSample("count_archive", "counts.npz", write_archive, ("counts of counts, an array",)),
    CountSample(
        "count_archive",
        "published.npz",
        write_published,
        (
            "counts of mine, the sum of 2 arrays",
            "assumed: the rows are layers 0, 7 and 15 of the model, as OLMoE counts; "
            "experts of other layers have no rank",
        ),
        layers=(0, 7, 15),
    ),
]
