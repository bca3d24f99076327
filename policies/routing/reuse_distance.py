"""CECAR (malmong/CECAR): lift resident experts by their expected next use, then drop cold and weak experts.

z' = z + delta * (1 - s / s_max) for a resident expert, where delta is the token's gap between its best and its k-th
choice score, s the predicted reuse distance of the expert in this layer and s_max the largest among the resident. The
top k of z' are chosen, ties as recorded, then by id; those of place `keep` and beyond that are not resident are dropped
(T = 4 in the authors' simulator). In decode passes only, as there; `phase=any` in all. Their inference code is another:
its gap reaches to the k+1-st, and residents of any rank fill up what was dropped.

The authors learn s with small networks from two features, whose weights are not published. Each feature alone stands
in: `predict=recency` takes the passes since the last use (or arrival by prefetch), `predict=interval` the mean number
of passes between uses so far.
"""

from moereplay.policies.contract import DECODE, NONE, Choice, Memory, Number, Routing, always, slot
from moereplay.policies.routing.cache_prior import is_resident
from moereplay.policies.selection import next_best, routed, write_by_rank

PARAMS = (
    Choice("predict", "recency", ("recency", "interval")),
    Number("keep", 4, 1, 64, integer=True),
    Choice("phase", "decode", ("decode", "any")),
)
PREDICT, KEEP, PHASE = slot(PARAMS, "predict"), slot(PARAMS, "keep"), slot(PARAMS, "phase")
INTERVAL, ANY = 1, 1
GATES = 0  # real: gates of this layer so far
MINUS_INFINITY = -float("inf")


def choose(now, step, experts, copies, own, out):
    """Choose for each token, against one snapshot of residency."""
    own.reals[now["layer"]][GATES] += 1.0
    active = now["phase"] == DECODE or own.par[PHASE] == ANY
    bonus = bonuses(now, experts, copies, own)
    for t in range(now["tokens"]):
        ids, wanted = step.ids[t], routed(step.ids[t])
        for j in range(len(out[t])):
            out[t][j] = ids[j]
        if active and wanted > 0:
            lift_and_drop(now, copies, step.choice[t], ids, wanted, bonus, int(own.par[KEEP]), out[t])


def bonuses(now, experts, copies, own):
    """Return for each expert of the layer the share of delta by which it is lifted; 0 unless resident."""
    first = now["layer"] * now["experts"]
    away = [0.0] * now["experts"]
    longest = 0.0
    for e in range(now["experts"]):
        if is_resident(now, copies, e):
            away[e] = distance(now, experts[first + e], own)
            longest = max(longest, away[e])
    for e in range(now["experts"]):
        if is_resident(now, copies, e):
            away[e] = 1.0 - away[e] / longest if longest > 0.0 else 1.0
    return away


def distance(now, expert, own):
    """Return the predicted passes until its next use; never used is farther than anything."""
    if own.par[PREDICT] == INTERVAL:
        gates = own.reals[now["layer"]][GATES]
        return gates / expert["uses_ever"] if expert["uses_ever"] > 0 else gates + 1.0
    return 1.0 * (now["pass"] - expert["last_pass"])


def lift_and_drop(now, copies, scores, ids, wanted, bonus, keep, row):
    """Write one token's experts by rank, chosen by lifted score; NONE in place of those dropped."""
    delta = scores[ids[0]] - scores[ids[wanted - 1]]
    lifted = [scores[e] + delta * bonus[e] for e in range(now["experts"])]
    for place in range(wanted):
        e = next_best(lifted, ids, now["experts"])
        lifted[e] = MINUS_INFINITY
        row[place] = e if e != NONE and (place < keep or is_resident(now, copies, e)) else NONE
    write_by_rank(row, wanted, ids, scores)


POLICY = Routing(
    name="reuse_distance",
    summary="lift experts that will be used soon, drop cold and weak ones",
    source="CECAR, github.com/malmong/CECAR (inference simulator)",
    params=PARAMS,
    memory=Memory(reals=1),
    needs=always("logits"),
    choose=choose,
    drops=True,
    reads=frozenset({"choice", "ids"}),
)
