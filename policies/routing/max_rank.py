"""Max Rank (arXiv 2412.00099, baseline): experts up to rank `m` may be reordered, the resident ones first.

The token's first `top_j` experts are kept. Among ranks top_j + 1 to m, resident experts come first in rank order, then
the others in rank order; the first k are chosen, and run in rank order. No expert beyond rank m is ever promoted;
m <= k is the recorded choice. Ranks are the recorded order, then descending choice score, ties by lowest id. The
default of m is that of re-implementations (colibri); J is -1 for the paper's: 2, or 1 for models of two experts.
`levels=2`, as colibri has it, prefers what the highest lower tier has (RAM, over a disk) to what it would have to read
from below; on a platform without lower tiers it changes nothing.
"""

from moereplay.policies.contract import NONE, Number, Routing, always, slot
from moereplay.policies.routing.cache_prior import is_resident
from moereplay.policies.selection import next_best, protected, routed

PARAMS = (
    Number("m", 12, 1, 4096, integer=True),
    Number("top_j", -1, -1, 64, integer=True),
    Number("levels", 1, 1, 2, integer=True, added=True),
)
M, TOP_J, LEVELS = slot(PARAMS, "m"), slot(PARAMS, "top_j"), slot(PARAMS, "levels")
FAST, RAM, BELOW = 0, 1, 2  # levels of an expert
MINUS_INFINITY = -float("inf")


def choose(now, step, experts, copies, own, out):
    """Choose for each token, against one snapshot of residency."""
    for t in range(now["tokens"]):
        ids = step.ids[t]
        window = min(max(int(own.par[M]), routed(ids)), now["experts"])
        order = ranked(step.choice[t], ids, window)
        level = [level_of(now, copies, e, int(own.par[LEVELS])) for e in order]
        cached_first(order, level, protected(now, own.par[TOP_J]), routed(ids), out[t])


def level_of(now, copies, e, levels):
    """Return where a copy of expert e is, or BELOW; one of `levels` does not tell RAM from below."""
    if e == NONE or is_resident(now, copies, e):
        return FAST
    first = (now["layer"] * now["experts"] + e) * now["precisions"]
    for y in range(first, first + now["precisions"]):
        if levels > 1 and copies[y]["lower"] == 1:
            return RAM
    return BELOW


def ranked(scores, ids, window):
    """Return the experts of the first `window` ranks; NONE where no permitted expert is left."""
    left, order = [z + 0.0 for z in scores], [-1] * window
    for e in ids:
        if e != NONE:
            left[e] = MINUS_INFINITY
    for place in range(window):
        e = ids[place] if place < len(ids) and ids[place] != NONE else next_best(left, ids, len(left))
        order[place] = e
        if e != NONE:
            left[e] = MINUS_INFINITY
    return order


def cached_first(order, level, top_j, wanted, row):
    """Fill a token's row with `wanted` experts, in rank order: the first top_j, then level by level."""
    taken, missing = [0] * len(order), wanted
    for turn in range(BELOW + 2):  # the protected ranks, then level by level
        for place in range(len(order)):
            if missing == 0 or order[place] == NONE or taken[place] == 1:
                continue
            if place < top_j if turn == 0 else level[place] == turn - 1:
                taken[place] = 1
                missing -= 1
    filled = 0
    for place in range(len(order)):
        if taken[place] == 1:
            row[filled] = order[place]
            filled += 1


POLICY = Routing(
    name="max_rank",
    summary="prefer resident experts among the m best",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 §3.2 (Max Rank)",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    reads=frozenset({"choice", "ids"}),
)
