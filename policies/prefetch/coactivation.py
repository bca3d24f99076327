"""Co-activation: the experts that most often followed the ones in use, from this layer to the next.

Each pass's last token teaches: its experts of a layer count once with each of its experts of the next. A demanded
expert then votes for every expert of the next layer with that count, times the tokens routed to it; the ceil(factor *
k) of most votes are suggested, ties by lowest id, none without votes. A causal baseline that needs ids alone.
"""

from moereplay.policies.contract import Memory, Number, Prefetch, slot
from moereplay.policies.selection import append_best, times_k

PARAMS = (Number("factor", 1.0, 0, 64),)
FACTOR = slot(PARAMS, "factor")
CHOICE, FOLLOWED = 0, 1  # row columns: 1 + the last token's expert of rank j (in the j-th row); counts by next expert
PASS = 0  # real: 1 + the pass that the layer's remembered token is from


def suggest(now, step, experts, copies, own, out):
    """Count the transition from the step before, then suggest what followed this one."""
    if now["layer"] > 0 and own.reals[now["layer"] - 1][PASS] == now["pass"] + 1.0:
        learn(now, step, own)
    remember(now, step, own)
    if now["layer"] + 1 == now["layers"]:
        return 0
    votes = [0] * now["experts"]
    for n in range(len(step.expert)):
        row = own.rows[step.expert[n] * now["precisions"]]
        for e in range(now["experts"]):
            votes[e] += step.tokens[n] * row[FOLLOWED + e]
    first = (now["layer"] + 1) * now["experts"]
    return append_best(votes, times_k(now, own.par[FACTOR]), first, now["precisions"], out, 0)


def learn(now, step, own):
    """Count the last token's pairs."""
    ids, first = step.ids[now["tokens"] - 1], (now["layer"] - 1) * now["experts"]
    for i in range(now["k"]):
        before = own.rows[(first + i) * now["precisions"]][CHOICE] - 1
        for j in range(now["k"]):
            if before >= 0 and ids[j] >= 0:
                own.rows[(first + before) * now["precisions"]][FOLLOWED + ids[j]] += 1


def remember(now, step, own):
    """Keep the last token's experts in rank order."""
    own.reals[now["layer"]][PASS] = now["pass"] + 1.0
    ids, first = step.ids[now["tokens"] - 1], now["layer"] * now["experts"]
    for j in range(now["k"]):
        own.rows[(first + j) * now["precisions"]][CHOICE] = ids[j] + 1


POLICY = Prefetch(
    name="coactivation",
    summary="prefetch what most often followed this layer's experts",
    source="a baseline; inter-layer affinity as in the statistical predictors that ProMoE and Fate compare with",
    params=PARAMS,
    memory=Memory(rows=1, rows_per_expert=1, reals=1),
    suggest=suggest,
    reads=frozenset({"ids"}),
)
