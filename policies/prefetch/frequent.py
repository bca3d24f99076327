"""Frequent: for each of the next `depth` layers, the experts used in most passes so far.

The ceil(factor * k) of most uses, ties by lowest id, none that was never used. A causal baseline that needs ids alone:
popularity without any prediction.
"""

from moereplay.policies.contract import Number, Prefetch, slot
from moereplay.policies.selection import append_best, times_k

PARAMS = (Number("factor", 1.0, 0, 64), Number("depth", 1, 1, 8, integer=True))
FACTOR, DEPTH = slot(PARAMS, "factor"), slot(PARAMS, "depth")


def suggest(now, step, experts, copies, own, out):
    """Suggest experts, the nearest layer first, each layer's by descending uses."""
    count = 0
    for layer in range(now["layer"] + 1, min(now["layer"] + 1 + int(own.par[DEPTH]), now["layers"])):
        first = layer * now["experts"]
        uses = [experts[x]["uses_ever"] for x in range(first, first + now["experts"])]
        count = append_best(uses, times_k(now, own.par[FACTOR]), first, now["precisions"], out, count)
    return count


def reach(params):
    """Return how many layers ahead are predicted."""
    return params["depth"]


POLICY = Prefetch(
    name="frequent",
    summary="prefetch the experts of the next layers used most so far",
    source="a baseline; popularity as in Fiddler's placement (arXiv 2402.07033)",
    params=PARAMS,
    suggest=suggest,
    reach=reach,
    reads=frozenset(),
)
