"""Prune one rank: each token runs all of its experts except one rank (arXiv 2412.00099, sensitivity to ranks).

Weights are those of a router of smaller k, as in `prune`.
"""

from moereplay.policies.contract import NONE, Number, Routing, always, slot

PARAMS = (Number("rank", 1, 1, 64, integer=True),)
RANK = slot(PARAMS, "rank")


def choose(now, step, experts, copies, own, out):
    """Keep the recorded ranks but one; a rank beyond k leaves nothing out."""
    for t in range(now["tokens"]):
        for j in range(len(out[t])):
            out[t][j] = NONE if j + 1 == own.par[RANK] else step.ids[t][j]


POLICY = Routing(
    name="prune_rank",
    summary="run all experts of each token except one rank",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 (sensitivity experiment)",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    drops=True,
    reads=frozenset({"ids"}),
)
