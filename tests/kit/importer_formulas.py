"""Formulas for samples of formats: every number follows from request, token, layer and rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Request

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
LAYERS, EXPERTS, K = 2, 8, 2
BYTES = (96, 128)
SIZED = Options(expert_bytes=BYTES)
METADATA = {"moereplay": {"model": "made-up", "layers": LAYERS, "experts": EXPERTS, "k": K, "expert_bytes": BYTES}}
DECODE_ONLY = "decode steps only: rows of the prompts were not recorded"
EXPERTS_UNKNOWN = "number of experts was not recorded: 8 is the highest id + 1"
BITS_UNKNOWN = "unknown precision of the expert bytes: assumed 16 bits; pass --expert-bits"


def expert(request: int, token: int, layer: int, rank: int) -> int:
    """An id; those of ranks 0 and 1 differ, and over some tokens all occur."""
    first = request + 3 * token + 5 * layer
    return (first + rank * (1 + token % 7)) % EXPERTS


def weight(token: int, layer: int, rank: int) -> float:
    """A gate weight that float16 holds exactly; those of a token at a layer sum to 1."""
    second = (1 + (token + layer) % 3) / 8
    return second if rank else 1 - second


def logit(request: int, token: int, layer: int, expert_id: int) -> float:
    """A raw logit; those of the chosen are the largest, in rank order."""
    ranks = {expert(request, token, layer, rank): rank for rank in range(K)}
    return 3.0 - ranks[expert_id] if expert_id in ranks else -expert_id / 4


def residency(token: int, layer: int, rank: int) -> int:
    """Return the state of a cache: 0 miss, 1 hit, 2 prefetched."""
    return (token + layer + rank) % 3


def grid(tokens: int, value: Callable[..., float], width: int = K) -> np.ndarray:
    """(T, L, width) of a formula over token, layer and rank or expert."""
    cells = [[[value(token, layer, at) for at in range(width)] for layer in range(LAYERS)] for token in range(tokens)]
    return np.array(cells)


def ids(request: int, tokens: int) -> np.ndarray:
    """(T, L, k) the experts of a request."""
    return grid(tokens, lambda token, layer, rank: expert(request, token, layer, rank))


def weights(tokens: int) -> np.ndarray:
    """(T, L, k) their weights."""
    return grid(tokens, weight)


@dataclass(frozen=True)
class Sample:
    """One format's sample: the file or folder, what writes it, and what comes out of it."""

    importer: str
    name: str  #: of the file or folder in `folder`
    write: Callable[[Path], None]
    requests: list[Request]
    notes: tuple[str, ...]
    expert_bytes: tuple[int, ...] = BYTES
    options: Options = SIZED
    model: str = "unknown"
    folder: Path = SAMPLES

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder / self.name
