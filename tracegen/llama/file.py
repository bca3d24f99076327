"""A GGUF file that is to be recorded: its header is read and checked by this project before llama.cpp sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import fingerprint
from moereplay.traces.checkpoints.found import parts_of
from moereplay.traces.checkpoints.gguf import Gguf, is_gguf, read_gguf
from moereplay.traces.checkpoints.tensors import model_of_gguf
from moereplay.traces.geometry import KnownModel
from moereplay.traces.schema import TraceError

BIAS = re.compile(r"blk\.(\d{1,5})\.exp_probs_b(?:\.bias)?")
ROUTED = re.compile(r"blk\.(\d{1,5})\.ffn_\w+_exps\.weight")
GGUF = ".gguf"


class GgufModel(NamedTuple):
    """A model of one file, or of the parts of a split one."""

    parts: tuple[Gguf, ...]
    known: KnownModel
    metadata: Mapping[str, Any]
    bias: np.ndarray | None  #: (L, E) f32 correction of the choice

    @property
    def path(self) -> Path:
        """The file that llama.cpp opens: the first."""
        return self.parts[0].path

    @property
    def sha256(self) -> str:
        """Fingerprint of the files."""
        return fingerprint([part.path for part in self.parts], lambda path: self._starts[path])

    @property
    def _starts(self) -> dict[Path, int]:
        return {part.path: part.start for part in self.parts}


def is_named(model: str) -> bool:
    """Return True if a model's name is a GGUF file's."""
    path = Path(model).expanduser()
    return path.suffix.lower() == GGUF or (path.is_file() and is_gguf(path))


def opened(model: str) -> GgufModel:
    """Read the headers of a GGUF file. Raises RecordError if one is missing, cut off or no mixture of experts."""
    path = Path(model).expanduser()
    if not path.is_file():
        raise RecordError(f"{model}: no such file: expected a GGUF file")
    try:
        parts = tuple(read_gguf(part) for part in parts_of(path))
        for part in parts:
            part.check_whole()
        known = model_of_gguf(list(parts), path.stem, str(path))
        bias = _bias(parts, known.geometry.experts)
    except TraceError as wrong:
        said = str(wrong)
        raise RecordError(said if path.stem in said else f"{path.name}: {said}") from None
    metadata = {key: value for part in reversed(parts) for key, value in part.metadata.items()}
    return GgufModel(parts, known, metadata, bias)


def _bias(parts: tuple[Gguf, ...], experts: int) -> np.ndarray | None:
    """Read the correction biases of all layers with routed experts, None if there are none."""
    found: dict[int, np.ndarray] = {}
    routed: set[int] = set()
    for part in parts:
        for name, place in part.tensors.items():
            if layer := ROUTED.fullmatch(name):
                routed.add(int(layer[1]))
            elif (layer := BIAS.fullmatch(name)) and place.weights == experts:
                found[int(layer[1])] = part.floats(name).reshape(-1)
    if not found:
        return None
    return np.stack([found.get(layer, np.zeros(experts, np.float32)) for layer in sorted(routed)]).astype(np.float32)
