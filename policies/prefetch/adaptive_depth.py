"""Adaptive depth (HOBBIT §3.3): suggest from the first of `p` layers whose predicted top k are not all resident.

The predicted top k of layer l + 1 are suggested; if every one of them is resident or on its way, those of l + 2 follow,
up to l + p. Suggesting a resident expert protects it if the eviction policy uses predictions, as HOBBIT's does.

`precision=high` fetches at the highest precision. `precision=scored` rates predictions as `miss hobbit` rates misses:
by the share of a token's predicted weight that lies before an expert, up to `t1` the highest precision, up to `t2` the
lowest, beyond it none. Scores that a correction bias makes negative weigh nothing.
"""

from moereplay.policies.blocks import scored_tier
from moereplay.policies.contract import ABSENT, DROP, Choice, Number, Prefetch, always, expert_of, slot
from moereplay.policies.selection import UNWANTED, append_descending, largest_score, notes

PARAMS = (
    Number("p", 2, 1, 8, integer=True),
    Choice("precision", "high", ("high", "scored")),
    Number("t1", 0.6, 0, 1),
    Number("t2", 0.9, 0, 1),
)
P, PRECISION, T1, T2 = slot(PARAMS, "p"), slot(PARAMS, "precision"), slot(PARAMS, "t1"), slot(PARAMS, "t2")
SCORED = 1
UNRATED = 1 << 30  # worse than any precision


def suggest(now, step, experts, copies, own, out):
    """Suggest experts, the nearest layer first, each layer's by descending largest score."""
    count = 0
    for d in range(min(int(own.par[P]), now["layers"] - 1 - now["layer"])):
        before = count
        count = suggest_layer(now, step, own, d, out, count)
        for i in range(before, count):
            if not is_coming(now, copies, out[i]):
                return count
    return count


def suggest_layer(now, step, own, d, out, count):
    """Suggest the predicted top k of layer + 1 + d of all tokens, at the best precision that a token gives each."""
    tiers = [UNRATED] * now["experts"]
    for t in range(now["tokens"]):
        rate_token(now, own, step.look_order[d][t], step.look_score[d][t], tiers)
    first, notes_first = (now["layer"] + 1 + d) * now["experts"], notes(now, out)
    for e in range(now["experts"]):
        rated = tiers[e] != UNRATED
        out[notes_first + e] = largest_score(step, d, now["tokens"], e) if rated else UNWANTED
    end = append_descending(now, first, out, count)
    for i in range(count, end):
        out[i] += tiers[expert_of(now, out[i]) - first]
    return end


def rate_token(now, own, order, scores, tiers):
    """Lower `tiers` to the precision that this token gives to its predicted top k."""
    total = ahead = 0
    for j in range(now["k"]):
        total += max(scores[order[j]], 0)
    for j in range(now["k"]):
        tier = 0
        if own.par[PRECISION] == SCORED:
            tier = scored_tier(ahead, total, own.par[T1], own.par[T2], now["precisions"] - 1)
        if tier != DROP:
            tiers[order[j]] = min(tiers[order[j]], tier)
        ahead += max(scores[order[j]], 0)


def is_coming(now, copies, y):
    """Return whether a copy at least as precise as y is resident, queued or in flight."""
    for copy in range(y - y % now["precisions"], y + 1):
        if copies[copy]["state"] != ABSENT:
            return True
    return False


def depth(params):
    """Return the number of look-ahead layers that are read."""
    return params["p"]


POLICY = Prefetch(
    name="adaptive_depth",
    summary="prefetch for the first of the next p layers that lacks a predicted expert",
    source="HOBBIT, arXiv 2411.01433 §3.3",
    params=PARAMS,
    needs=always("lookahead"),
    suggest=suggest,
    depth=depth,
    reads=frozenset(),
)
