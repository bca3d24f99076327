"""Do a gate's choice and weights follow from its logits by `traces/routers.py`? Row by row, in numbers.

The rule computes with numpy's exp, the model with torch's: they differ in the last bit now and then, and so do sums
of k or E of them. So the choice is equal exactly, except where scores are closer than that:

- A row is *tied* if its chosen set is not the rule's, but is once the scores of the chosen are lifted by TIE_ULPS units
  in the last place (f32), each in the precision in which models rank: probabilities, probabilities plus bias, or bare
  logits. Scores that are equal there leave the choice to topk's implementation; logits in bf16 often are.
- Weights are compared in the model's dtype, in units in its last place, up to MAX_ULPS.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moereplay.traces.routers import choice_scores, choose, scores, weigh
from moereplay.traces.schema import Router

TIE_ULPS = 4
#: Of the model's dtype: in f32 the rounding of exp, of sums of many, of a division; in half precision the last cast.
MAX_ULPS = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
#: An expert this close (relative) to the edge of SparseMixer's band may fall on either side: models divide in bf16.
BAND_EDGE = 2.0**-7


class Agreement(NamedTuple):
    """What a comparison of T rows found."""

    rows: int
    wrong: int  #: rows whose choice the rule does not make, ties aside
    ties: int  #: rows whose choice is the rule's but for a tie
    ulps: int  #: the largest difference of a weight, in units in the last place of the model's dtype
    bound: int  #: of `ulps`

    @property
    def holds(self) -> bool:
        """Whether the gate routes by the rule."""
        return not self.wrong and self.ulps <= self.bound


def agree(router: Router, bias: np.ndarray | None, logits: Tensor, weights: Tensor, ids: Tensor) -> Agreement:
    """Compares logits (T, E), weights (T, k) and ids (T, k) of a gate with the rule; `bias` is (E,) or None.

    Raises TraceError if the router's groups do not divide the experts.
    """
    rows, chosen = logits.float().cpu().numpy(), ids.cpu().numpy()
    differs = _differs(choice_scores(router, rows, bias), chosen)
    wrong = differs & _differs(_lifted(router, rows, bias, chosen), chosen)
    ulps = _ulps(router, rows, weights.cpu(), chosen)
    return Agreement(len(rows), int(wrong.sum()), int((differs & ~wrong).sum()), ulps, MAX_ULPS[weights.dtype])


def _differs(choice: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """(T,) whether the best by choice score are another set than the chosen."""
    best = choose(choice, chosen.shape[-1])
    return (np.sort(best, -1) != np.sort(chosen, -1)).any(-1)


def _lifted(router: Router, logits: np.ndarray, bias: np.ndarray | None, chosen: np.ndarray) -> np.ndarray:
    """Choice scores with those of the chosen raised by TIE_ULPS units in the last place."""
    bare = router.family in ("topk_softmax", "sparsemixer")
    ranked = logits if bare else scores(router, logits, bias)
    lift = np.zeros_like(ranked)
    np.put_along_axis(lift, chosen, TIE_ULPS * np.spacing(np.abs(np.take_along_axis(ranked, chosen, -1))), -1)
    if bare:
        return choice_scores(router, logits + lift)
    return choice_scores(router, logits, lift if bias is None else bias + lift)


def _ulps(router: Router, logits: np.ndarray, weights: Tensor, chosen: np.ndarray) -> int:
    edges = (1 - BAND_EDGE, 1, 1 + BAND_EDGE) if router.family == "sparsemixer" else (1,)
    rules = [router.model_copy(update={"jitter": router.jitter * edge}) for edge in edges]
    distances = [_distance(torch.from_numpy(weigh(rule, logits, chosen)).to(weights.dtype), weights) for rule in rules]
    return int(torch.stack(distances).amin(0).max())


def _distance(left: Tensor, right: Tensor) -> Tensor:
    """Steps between two tensors of one float dtype, counted in representable numbers."""
    return (_ordinal(left) - _ordinal(right)).abs()


def _ordinal(values: Tensor) -> Tensor:
    """Integers in the order of the floats: the bits, mirrored for negative numbers."""
    width = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().view(width).long()
    return torch.where(bits < 0, torch.iinfo(width).min - bits, bits)
