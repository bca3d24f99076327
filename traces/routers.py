"""Router rules: logits to a choice of experts and their gate weights, for every family of `schema.Router`.

Choice and weight are separate: the choice ranks *choice scores* (`choice_scores`, then `choose`), while weights
always come from the unmodified logits (`weigh`), even if a policy chose the ids. The rules are those of the models'
published code: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (2412.19437), SparseMixer in Phi-3.5-MoE (2404.14219),
gpt-oss. The last axis is experts or ranks; leading axes (tokens, or tokens and layers) are free.
"""

from __future__ import annotations

import numpy as np

from moereplay.traces.schema import Router, TraceError
from moereplay.traces.units import UNIT

GROUPED = ("softmax_groups", "sigmoid_groups")


def choice_scores(router: Router, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the scores whose top k is the choice, (..., E) f32; experts outside the kept groups are -inf.

    Softmax families without a bias rank the logits themselves: softmax is monotone. `bias` is the correction bias (E,),
    or any shape that broadcasts: of sigmoid routers, and of softmax ones in Ernie 4.5. Raises TraceError if the groups
    do not divide the experts.
    """
    logits = np.asarray(logits, np.float32)
    if router.family == "sigmoid_groups" or bias is not None:
        logits = scores(router, logits, bias)
    return _within_groups(router, logits) if router.family in GROUPED else logits


def choose(choice: np.ndarray, k: int) -> np.ndarray:
    """Return the k experts of highest choice score in rank order, (..., k) int16; ties go to the lowest id."""
    return np.argsort(-choice, axis=-1, kind="stable")[..., :k].astype(np.int16)


def scores(router: Router, logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the probabilities of all experts under the family's scoring function, (..., E) f32.

    This is a softmax over all experts or a sigmoid, plus the correction bias if given, without a mask of groups.
    Scores are comparable across tokens.
    """
    logits = np.asarray(logits, np.float32)
    plain = _sigmoid(logits) if router.family == "sigmoid_groups" else _softmax(logits)
    return plain if bias is None else plain + np.asarray(bias, np.float32)


def shares(router: Router, logits: np.ndarray) -> np.ndarray:
    """Return the shares from which weights are computed, (..., E) f32: softmax over all experts, or sigmoid.

    Later steps use + * / in float64 in a fixed order, so that compiled code computes the same bits.
    """
    return scores(router, logits)


def weigh(router: Router, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return gate weights (..., k) f32 of the given ids (..., k) from unmodified logits (..., E); id -1 weighs 0.

    `ids` need not be the model's own choice: a routing policy may have replaced some.
    """
    logits = np.asarray(logits, np.float32)
    routed = np.asarray(ids) >= 0
    picks = np.where(routed, ids, 0).astype(np.intp)
    share = shares(router, logits).astype(np.float64)
    if router.family == "sparsemixer":
        weights = _sparsemixer(router.jitter, share, logits, picks, routed)
    else:
        weights = np.take_along_axis(share, picks, -1) * routed
        weights = _over(weights, _sum_in_order(weights)) if is_shared(router) else weights
    return (weights * router.scale).astype(np.float32)


def to_units(weights: np.ndarray) -> np.ndarray:
    """Return weights or scores as int64 multiples of 1 / UNIT, rounded half to even."""
    return np.rint(weights.astype(np.float64) * UNIT).astype(np.int64)


def is_shared(router: Router) -> bool:
    """Return True if the weights of a token's experts are divided by their sum."""
    # DeepSeek-V2 scales but never renormalises, regardless of its config
    return router.family == "topk_softmax" or (router.renormalise and router.family != "softmax_groups")


def _sparsemixer(
    jitter: float, share: np.ndarray, logits: np.ndarray, picks: np.ndarray, routed: np.ndarray
) -> np.ndarray:
    """Return each pick's share among experts not picked before it and at most 2 jitter (relative) below it.

    The model measures the distance from the best remaining expert, which is its pick. For an id that a policy chose,
    the pick itself is the reference; otherwise it could fall outside its own band and have weight 0.
    """
    left = np.ones(logits.shape, bool)
    weights = np.zeros(picks.shape)
    for rank in range(picks.shape[-1]):
        pick = picks[..., rank : rank + 1]
        reference = np.take_along_axis(logits, pick, -1)
        near = share * (left & (_relative_gap(reference, logits) <= 2 * jitter))
        own = np.take_along_axis(near, pick, -1) * routed[..., rank : rank + 1]
        weights[..., rank] = _over(own, _sum_in_order(near))[..., 0]
        taken = np.take_along_axis(left, pick, -1) & ~routed[..., rank : rank + 1]
        np.put_along_axis(left, pick, taken, -1)
    return weights


def _sum_in_order(parts: np.ndarray) -> np.ndarray:
    """Add in rank order; numpy's `sum` would add in pairs."""
    return np.add.accumulate(parts, -1)[..., -1:]


def _over(parts: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.divide(parts, total, out=np.zeros_like(parts), where=total > 0)


def _relative_gap(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    size = np.maximum(np.abs(logits), reference)
    return np.divide(reference - logits, size, out=np.zeros_like(logits), where=size != 0)


def _within_groups(router: Router, choice: np.ndarray) -> np.ndarray:
    if router.groups_kept >= router.groups:
        return choice
    experts = choice.shape[-1]
    if experts % router.groups:
        raise TraceError(f"router has {router.groups} groups for {experts} experts: expected a divisor of {experts}")
    grouped = choice.reshape(*choice.shape[:-1], router.groups, -1)
    # DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 by the sum of their two best
    best = 1 if router.family == "softmax_groups" else 2
    strength = np.sort(grouped, axis=-1)[..., -best:].sum(-1)
    kept = np.zeros(strength.shape, bool)
    np.put_along_axis(kept, choose(strength, router.groups_kept).astype(np.intp), True, -1)
    return np.where(kept[..., None], grouped, np.float32(-np.inf)).reshape(choice.shape)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    # e^-|x| cannot overflow; double precision keeps close logits distinct until the final rounding
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return (np.where(logits >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


def _softmax(logits: np.ndarray) -> np.ndarray:
    parts = np.exp(logits - logits.max(-1, keepdims=True))
    return _over(parts, parts.sum(-1, keepdims=True))
