"""A GGUF file that is to be recorded: its header, read and checked before llama.cpp sees it, and its routing rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import fingerprint
from moereplay.traces.checkpoints.found import parts_of
from moereplay.traces.checkpoints.gguf import Gguf, is_gguf, read_gguf
from moereplay.traces.checkpoints.tensors import model_of_gguf
from moereplay.traces.geometry import KnownModel
from moereplay.traces.routers import GROUPED, choice_scores, choose, weigh
from moereplay.traces.schema import Router, TraceError

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


# -- The routing rule of a GGUF file: what its metadata allows, and of that what reproduces the gates of a probe.
# -- llama.cpp computes exponentials by polynomials: weights agree to single precision's rounding, not bit for bit.

#: `expert_gating_func` of a file's metadata; most files leave it to llama.cpp's code for the architecture.
GATINGS = {1: "softmax_topk", 2: "sigmoid_groups", 3: "topk_softmax"}
NEAR = 2e-5  #: largest relative difference of a weight, and of a choice score between experts that tie


def rule_of(said: Mapping[str, Any], bias: np.ndarray | None, rows: Mapping[str, np.ndarray]) -> Router:
    """Return the first rule that gives the recorded choice and weights of all rows (T, L, ...); `bias` is (L, E).

    Raises RecordError if none does.
    """
    for router in _candidates(said, rows["logits"].shape[-1]):
        if _holds(router, bias, rows):
            return router
    how = "pass --no-logits to record the choice and weights alone"
    raise RecordError(f"no known routing rule reproduces this model's choice and weights from its logits; {how}")


def _candidates(said: Mapping[str, Any], experts: int) -> Iterator[Router]:
    architecture = said.get("general.architecture")

    def stated(key: str, kind: type | tuple[type, ...], otherwise: Any) -> Any:
        value = said.get(f"{architecture}.{key}")
        return value if isinstance(value, kind) and value == value else otherwise

    gating = GATINGS.get(stated("expert_gating_func", int, 0))
    norm = stated("expert_weights_norm", bool, True)
    scale = float(stated("expert_weights_scale", (int, float), 1.0)) or 1.0
    groups, kept = stated("expert_group_count", int, 1), stated("expert_group_used_count", int, 1)
    families = [gating] if gating else []
    families += [each for each in ("softmax_topk", "sigmoid_groups", "topk_softmax") if each != gating]
    grouped = {"groups": groups, "groups_kept": kept} if 1 < groups <= experts and experts % groups == 0 < kept else {}
    for family, renormalise, factor in product(families, (norm, not norm), dict.fromkeys((scale, 1.0))):
        own = grouped if family in GROUPED else {}
        yield Router.model_validate({"family": family, "renormalise": renormalise, "scale": factor, **own})
        if family == "softmax_topk" and not renormalise and grouped:
            yield Router.model_validate({"family": "softmax_groups", "scale": factor, **grouped})


def _holds(router: Router, bias: np.ndarray | None, rows: Mapping[str, np.ndarray]) -> bool:
    logits, chosen, weights = rows["logits"], rows["chosen"].astype(np.intp), rows["weights"]
    expected = weigh(router, logits, chosen)
    if not (np.abs(expected - weights) <= NEAR * np.maximum(np.abs(weights), 1e-3)).all():
        return False
    ranked = choice_scores(router, logits, bias)
    best = choose(ranked, chosen.shape[-1]).astype(np.intp)
    mine, theirs = (np.sort(np.take_along_axis(ranked, ids, -1), -1) for ids in (best, chosen))
    return bool((np.abs(mine - theirs) <= NEAR * np.maximum(np.abs(mine), 1e-3)).all())
