"""The routing rule of a model: stated by its family's file, or inferred from its config and checked on a probe run.

A rule that was inferred is used only if it reproduces the choice and the weights of every gate in a probe run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moereplay.tracegen import families
from moereplay.tracegen.errors import RecordError
from moereplay.traces.routers import choice_scores, choose, scores, weigh
from moereplay.traces.schema import Router

#: Config keys by which models state the factor on gate weights.
SCALE_KEYS = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
#: Config keys by which models state the number of shared experts.
SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


class Routing(NamedTuple):
    """A model's routing rule and its family."""

    family: str
    router: Router
    shared: int  #: shared experts per MoE layer


def routing_of(config: Any, outputs: list[tuple[Tensor, Tensor, Tensor]], bias: np.ndarray | None) -> Routing:
    """The rule of the gates that gave these (logits, weights, ids), one entry per layer; `bias` is (L, E) or None.

    Raises RecordError, naming the family and the nearest rule, if no row of the table and no inferred rule holds.
    """
    family = families.family_of(config.model_type)
    if family is not None:
        return Routing(family.name, family.router(config), family.shared(config))
    return Routing(f"{config.model_type} (inferred)", _inferred(config, outputs, bias), _shared(config))


def _inferred(config: Any, outputs: list[tuple[Tensor, Tensor, Tensor]], bias: np.ndarray | None) -> Router:
    tried: list[tuple[Router, Agreement]] = []
    for router in candidates(config, bias is not None):
        found = _agreement(router, outputs, bias)
        if found.holds:
            return router
        tried.append((router, found))
    nearest, found = min(tried, key=lambda each: (each[1].wrong, each[1].ulps))
    what = f"weights are {found.ulps} units in the last place off those" if not found.wrong else "choice is not that"
    raise RecordError(
        f"unknown family {config.model_type}: its gates' {what} of the nearest rule ({spelled(nearest)}), "
        f"{found.wrong} of {found.rows} rows choose differently; add its rule to tracegen/families.py"
    )


def candidates(config: Any, biased: bool) -> Iterator[Router]:
    """Yield rules that a config's usual keys allow, likeliest first; keys that it lacks are tried both ways."""
    scale = next((float(value) for key in SCALE_KEYS if (value := getattr(config, key, None))), 1.0)
    groups, kept = (int(getattr(config, key, None) or 1) for key in ("n_group", "topk_group"))
    stated = getattr(config, "norm_topk_prob", None)
    renormalise = (bool(stated), not stated) if stated is not None else (True, False)
    families_ = ("sigmoid_groups", "softmax_topk") if biased else ("softmax_topk", "sigmoid_groups")
    for family, renormalised, factor in product(families_, renormalise, dict.fromkeys((scale, 1.0))):
        limits = {"groups": groups, "groups_kept": kept} if family == "sigmoid_groups" else {}
        yield Router.model_validate({"family": family, "renormalise": renormalised, "scale": factor, **limits})
    if groups > 1:
        yield Router(family="softmax_groups", groups=groups, groups_kept=kept, scale=scale)
    yield Router(family="topk_softmax")


def spelled(router: Router) -> str:
    """Return a rule in one line: its family and what differs from the defaults."""
    constants = router.model_dump(exclude={"family"}, exclude_defaults=True)
    return ", ".join([router.family, *(f"{key} {value}" for key, value in constants.items())])


def _agreement(router: Router, outputs: list[tuple[Tensor, Tensor, Tensor]], bias: np.ndarray | None) -> Agreement:
    """Compare all layers together."""
    found = [agree(router, None if bias is None else bias[at], *output) for at, output in enumerate(outputs)]
    rows, wrong, ties, ulps, bound = zip(*found, strict=True)
    return Agreement(sum(rows), sum(wrong), sum(ties), max(ulps), bound[0])


def _shared(config: Any) -> int:
    if getattr(config, "shared_expert_intermediate_size", None):
        return 1
    return next((int(count) for key in SHARED_KEYS if (count := getattr(config, key, None))), 0)


# -- Do a gate's choice and weights follow from its logits by `traces/routers.py`? Row by row, in numbers.

TIE_ULPS = 4
#: Of the model's dtype: in f32 the rounding of exp, of sums of many, of a division; in half precision the last cast.
MAX_ULPS = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
#: An expert this close (relative) to the edge of SparseMixer's band may fall on either side: models divide in bf16.
BAND_EDGE = 2.0**-7


class Agreement(NamedTuple):
    """Result of a comparison of T rows."""

    rows: int
    wrong: int  #: rows whose choice the rule does not make, ties aside
    ties: int  #: rows whose choice is the rule's but for a tie
    ulps: int  #: the largest difference of a weight, in units in the last place of the model's dtype
    bound: int  #: of `ulps`

    @property
    def holds(self) -> bool:
        """True if the gate routes by the rule."""
        return not self.wrong and self.ulps <= self.bound


def agree(router: Router, bias: np.ndarray | None, logits: Tensor, weights: Tensor, ids: Tensor) -> Agreement:
    """Compare logits (T, E), weights (T, k) and ids (T, k) of a gate with the rule; `bias` is (E,) or None.

    Raises TraceError if the router's groups do not divide the experts.
    """
    rows, chosen = logits.float().cpu().numpy(), ids.cpu().numpy()
    differs = _differs(choice_scores(router, rows, bias), chosen)
    wrong = differs & _differs(_lifted(router, rows, bias, chosen), chosen)
    ulps = _ulps(router, rows, weights.cpu(), chosen)
    return Agreement(len(rows), int(wrong.sum()), int((differs & ~wrong).sum()), ulps, MAX_ULPS[weights.dtype])


def _differs(choice: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return (T,) True where the best by choice score are not the chosen set."""
    best = choose(choice, chosen.shape[-1])
    return (np.sort(best, -1) != np.sort(chosen, -1)).any(-1)


def _lifted(router: Router, logits: np.ndarray, bias: np.ndarray | None, chosen: np.ndarray) -> np.ndarray:
    """Return the choice scores, with those of chosen experts raised by TIE_ULPS units in the last place."""
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
    """Return steps between two tensors of one float dtype, counted in representable numbers."""
    return (_ordinal(left) - _ordinal(right)).abs()


def _ordinal(values: Tensor) -> Tensor:
    """Return integers in the order of the floats: the bits, mirrored for negative numbers."""
    width = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().view(width).long()
    return torch.where(bits < 0, torch.iinfo(width).min - bits, bits)
