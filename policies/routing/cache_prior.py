"""Cache-Prior (arXiv 2412.00099, eq. 9-10): lift the scores of resident experts before the top-k.

z' = z + lam * delta * [resident, or among the token's own top_j]. Chosen by z'; weights and ranks stay those of z. The
own top_j are those of largest gate weight (as in the authors' code: a correction bias may order scores otherwise), or
of best rank where weights are not recorded; -1 stands for their values, 2, or 1 for models of two experts per token.
`delta` is the running mean over tokens of max(z) - min(z) per layer, the current token included (the authors' code);
other readings are named options. A reset clears it. CECAR's `ema_range` was made for decode passes alone.
"""

from policies.contract import NONE, RESIDENT, Choice, Memory, Number, Routing, always, slot
from policies.selection import is_among, keep_best, protected, routed, write_by_rank

PARAMS = (
    Number("lam", 0.2, 0, 10),
    Number("top_j", -1, -1, 64, integer=True),
    Choice("delta", "running_range", ("running_range", "token_range", "ema_range", "running_mean")),
)
LAM, TOP_J, DELTA = slot(PARAMS, "lam"), slot(PARAMS, "top_j"), slot(PARAMS, "delta")
RUNNING_RANGE, TOKEN_RANGE, EMA_RANGE, RUNNING_MEAN = 0, 1, 2, 3
SUM, COUNT = 0, 1
EMA = 0.99
MINUS_INFINITY = -float("inf")


def choose(now, step, experts, copies, own, out):
    """Per token, against one snapshot of residency; the running statistics advance token by token."""
    top_j = protected(now, own.par[TOP_J])
    for t in range(now["tokens"]):
        ids, scores, wanted = step.ids[t], step.choice[t], routed(step.ids[t])
        if wanted == 0:
            continue
        lift = own.par[LAM] * spread(now, own, scores)
        if lift == 0.0:  # the recorded choice, also where rounding has the model's own order differ from its logits'
            for j in range(wanted):
                out[t][j] = ids[j]
            continue
        names, lifted = [NONE] * wanted, [MINUS_INFINITY] * wanted
        weights = step.weight[t] if len(step.weight) > 0 else ids[:0]
        contend(now, copies, ids, scores, weights, top_j, lift, names, lifted)
        write_by_rank(names, ids, scores, out[t])


def contend(now, copies, ids, scores, weights, top_j, lift, names, lifted):
    """Keep the best by lifted score; equals stay in the recorded order, then by id."""
    for j in range(len(ids)):
        if ids[j] >= 0:
            is_lifted = weight_rank(weights, j) < top_j or is_resident(now, copies, ids[j])
            keep_best(names, lifted, ids[j], scores[ids[j]] + (lift if is_lifted else 0.0))
    worst = len(names) - 1
    for e in range(now["experts"]):
        if scores[e] + max(lift, 0.0) > lifted[worst] and not is_among(ids, len(ids), e):
            keep_best(names, lifted, e, scores[e] + (lift if is_resident(now, copies, e) else 0.0))


def weight_rank(weights, j):
    """How many of a token's experts have more gate weight than its j-th, ties to the better rank; j without weights."""
    if len(weights) == 0:
        return j
    before = 0
    for i in range(len(weights)):
        if weights[i] > weights[j] or (weights[i] == weights[j] and i < j):
            before += 1
    return before


def is_resident(now, copies, e):
    """Whether any copy of the layer's expert e is resident."""
    first = (now["layer"] * now["experts"] + e) * now["precisions"]
    for y in range(first, first + now["precisions"]):
        if copies[y]["state"] == RESIDENT:
            return True
    return False


def spread(now, own, scores):
    """The scale of the lift, by the reading of `delta`; masked experts (-inf) are no part of it."""
    low, high, total, count = statistics(scores)
    state, reading = own.reals[now["layer"]], own.par[DELTA]
    if reading == TOKEN_RANGE:
        return high - low
    if reading == EMA_RANGE:
        state[SUM] = EMA * state[SUM] + (1.0 - EMA) * (high - low) if state[COUNT] > 0 else high - low
        state[COUNT] += 1.0
        return state[SUM]
    state[SUM] += total / count if reading == RUNNING_MEAN else high - low
    state[COUNT] += 1.0
    return state[SUM] / state[COUNT]


def statistics(scores):
    """(smallest, largest, sum, count) of the finite scores."""
    low, high, total, count = float("inf"), MINUS_INFINITY, 0.0, 0
    for z in scores:
        if z > MINUS_INFINITY:
            low, high, total, count = min(low, z), max(high, z), total + z, count + 1
    return low, high, total, count


POLICY = Routing(
    name="cache_prior",
    summary="lift resident experts before the top-k",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 §3.3",
    params=PARAMS,
    memory=Memory(reals=2),
    needs=always("logits"),
    choose=choose,
)
