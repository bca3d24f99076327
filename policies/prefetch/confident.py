"""Confident (SMoE, Zhu et al. 2508.18983): suggest experts predicted clearly above the rest, if this layer missed.

Of a token's predicted top k those whose score is at least (1 + alpha) times the k+1-st. Suggested only if this layer
has a miss left once stand-ins have taken their share: then the link or the CPU is busy anyway, and compute waits.
Before anything is looked up (contract `sequential`, prefetch at the gate) it is a demanded expert of which no copy is
resident or in flight. `after_miss=false` suggests always. The source predicts from a partial hidden state, this from
the trace's look-ahead. It clears its queue when a layer starts, as every engine here cancels overtaken prefetches.
"""

from moereplay.policies.contract import IN_FLIGHT, RESIDENT, Choice, Number, Prefetch, always, slot
from moereplay.policies.selection import mark, suggest_marked, unmark

PARAMS = (Number("alpha", 0.35, 0, 100), Choice("after_miss", "true", ("true", "false")))
ALPHA, AFTER_MISS = slot(PARAMS, "alpha"), slot(PARAMS, "after_miss")
FALSE = 1


def misses(now, step, copies):
    """Return whether this layer has an executed miss, or would have one if everything were looked up now."""
    if now["absent"] >= 0:
        return now["absent"] > 0
    for x in step.expert:
        if not is_coming(now, copies, x):
            return True
    return False


def is_coming(now, copies, x):
    """Return whether any copy of the expert is resident or in flight."""
    for y in range(x * now["precisions"], (x + 1) * now["precisions"]):
        if copies[y]["state"] == RESIDENT or copies[y]["state"] == IN_FLIGHT:
            return True
    return False


def suggest(now, step, experts, copies, own, out):
    """Suggest for each token the experts above its threshold, as a union over the tokens of the pass."""
    last_layer = now["layer"] + 1 == now["layers"]
    if last_layer or (own.par[AFTER_MISS] != FALSE and not misses(now, step, copies)):
        return 0
    unmark(now, out)
    for t in range(now["tokens"]):
        wanted = confident(own.par[ALPHA], step.look_order[0][t], step.look_score[0][t], now["k"])
        mark(now, step, 0, t, wanted, out)
    return suggest_marked(now, step, 0, out, 0)


def confident(alpha, order, scores, k):
    """Count which of the k best score at least (1 + alpha) times the k+1-st, and at least 0."""
    threshold = (1.0 + alpha) * max(scores[order[k]], 0) if k < len(order) else 0.0
    count = 0
    while count < k and scores[order[count]] >= threshold:
        count += 1
    return count


def depth(params):
    """Return 1: the next layer only."""
    return 1


POLICY = Prefetch(
    name="confident",
    summary="prefetch experts predicted clearly above the k+1-st, after a miss",
    source="SMoE, Zhu et al. arXiv 2508.18983 (top-score online prefetch)",
    params=PARAMS,
    needs=always("lookahead"),
    suggest=suggest,
    depth=depth,
    reads=frozenset(),
)
