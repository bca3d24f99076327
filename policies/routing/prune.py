"""Prune: each token runs its best `keep` experts, resident or not (a baseline of arXiv 2412.00099).

Weights are those of a router of smaller k: from the unmodified logits, renormalised where the model renormalises.
"""

from moereplay.policies.contract import NONE, Number, Routing, always, slot

PARAMS = (Number("keep", 2, 1, 64, integer=True),)
KEEP = slot(PARAMS, "keep")


def choose(now, step, experts, copies, own, out):
    """Keep the first of the recorded ranks."""
    for t in range(now["tokens"]):
        for j in range(len(out[t])):
            out[t][j] = step.ids[t][j] if j < own.par[KEEP] else NONE


POLICY = Routing(
    name="prune",
    summary="run only the best `keep` experts of each token",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 (baseline)",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    drops=True,
    reads=frozenset({"ids"}),
)
