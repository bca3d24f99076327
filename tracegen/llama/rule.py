"""The routing rule of a GGUF file: what its metadata allows, and of that what reproduces the gates of a probe.

llama.cpp computes exponentials by polynomials, so weights agree to single precision's rounding and not bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.traces.routers import GROUPED, choice_scores, choose, weigh
from moereplay.traces.schema import Router

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
