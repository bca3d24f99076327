"""Swap: each token's expert of rank `rank` (1 is the router's first) is replaced by one that was not chosen.

The sensitivity experiment of arXiv 2412.00099: which ranks matter to a model. The paper does not specify the replacing
expert: `by=random` draws among all that the router may choose (a hash of seed, pass, layer and token), `by=next` takes
the best that was not chosen, ties by lowest id.
"""

from moereplay.policies.blocks import counter_hash
from moereplay.policies.contract import NONE, Choice, Number, Routing, always, slot
from moereplay.policies.selection import next_best

PARAMS = (
    Number("rank", 2, 1, 64, integer=True),
    Number("seed", 0, 0, 2**31 - 2, integer=True),
    Choice("by", "random", ("random", "next")),
)
RANK, SEED, BY = slot(PARAMS, "rank"), slot(PARAMS, "seed"), slot(PARAMS, "by")
NEXT = 1
MINUS_INFINITY = -float("inf")


def choose(now, step, experts, copies, own, out):
    """Replace one expert per token; tokens without a possible replacement stay as they are."""
    place = int(own.par[RANK]) - 1
    for t in range(now["tokens"]):
        ids = step.ids[t]
        for j in range(len(out[t])):
            out[t][j] = ids[j]
        if place < len(ids) and ids[place] != NONE:
            other = stranger(now, own, step.choice[t], ids, t)
            out[t][place] = other if other != NONE else ids[place]


def stranger(now, own, scores, ids, t):
    """Return an expert that the token was not routed to, or NONE."""
    left = [z + 0.0 for z in scores]
    for e in ids:
        if e != NONE:
            left[e] = MINUS_INFINITY
    if own.par[BY] == NEXT:
        return next_best(left, ids, now["experts"])
    count = 0
    for z in left:
        count += 1 if z > MINUS_INFINITY else 0
    if count == 0:
        return NONE
    drawn = counter_hash(now["seed"], int(own.par[SEED]), now["pass"], t)
    return nth(left, counter_hash(drawn, now["layer"], 0, 0) % count)


def nth(left, n):
    """Return the n-th expert, by id, that is not excluded."""
    for e in range(len(left)):
        if left[e] > MINUS_INFINITY:
            if n == 0:
                return e
            n -= 1
    return NONE


POLICY = Routing(
    name="swap",
    summary="replace each token's expert of one rank by another",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 (sensitivity experiment)",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    reads=frozenset({"choice", "ids"}),
)
