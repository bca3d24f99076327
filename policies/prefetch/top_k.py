"""Top-k: the ceil(factor * k) experts that the look-ahead scores highest, for each of the next `depth` layers."""

from moereplay.policies.contract import Choice, Number, Prefetch, slot
from moereplay.policies.selection import suggest_best_of_each, times_k

PARAMS = (
    Number("factor", 1.0, 0, 64),
    Number("depth", 1, 1, 8, integer=True),
    Choice("source", "next_gate", ("next_gate", "current_gate")),
)
FACTOR, DEPTH = slot(PARAMS, "factor"), slot(PARAMS, "depth")


def suggest(now, step, experts, copies, own, out):
    """Suggest the best experts of each token, as a union over the tokens of the pass; the nearest layer first."""
    each, count = times_k(now, own.par[FACTOR]), 0
    for d in range(int(own.par[DEPTH])):
        count = suggest_best_of_each(now, step, d, each, out, count)
    return count


def needs(params):
    """Return the needs: look-ahead logits, or this layer's own for `current_gate`."""
    return frozenset({"lookahead" if params["source"] == "next_gate" else "logits"})


def depth(params):
    """Return the number of look-ahead layers that are read."""
    return params["depth"]


def own_scores(params):
    """Return True if this layer's own scores are used in place of the next gates'."""
    return params["source"] == "current_gate"


POLICY = Prefetch(
    name="top_k",
    summary="prefetch the best ceil(factor * k) experts of the next layers' gates",
    source="SpecMD §3.1.4; Eliseev & Mazur (arXiv 2312.17238)",
    params=PARAMS,
    needs=needs,
    suggest=suggest,
    depth=depth,
    own_scores=own_scores,
    reads=frozenset(),
)
