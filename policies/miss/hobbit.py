"""HOBBIT's token-level dynamic loading (§3.2): the more of a token's weight ranks before an expert, the fewer its bits.

A token's experts are sorted by gate weight, ties by rank; s is the share of the token's weight before the expert. On a
miss s <= t1 fetches the highest precision of `bits`, s <= t2 the lowest, and beyond t2 it is skipped. Over the tokens
of a pass the best counts. A resident copy of higher precision satisfies a request for the lower, and an expert to be
skipped is run at whatever precision is there; a resident low copy of an important expert is a miss. Pairs of the paper:
16/4 and 8/2; t1 = 0.6 and t2 = 0.9 give 67 / 30 / 3 % on Mixtral.
"""

from moereplay.policies.blocks import scored_tier
from moereplay.policies.contract import DROP, Miss, Number, Numbers, always, slot

PARAMS = (Number("t1", 0.6, 0, 1), Number("t2", 0.9, 0, 1), Numbers("bits", (16, 4), 1, 32))
T1, T2, BITS = slot(PARAMS, "t1"), slot(PARAMS, "t2"), slot(PARAMS, "bits")
UNRATED = 1 << 30  # worse than any precision


def want(now, step, experts, copies, own, n):
    """Return the least sufficient precision."""
    tier = rated(now, step, own, n)
    return int(own.par[BITS]) - 1 if tier == DROP else tier


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Choose the precision that `rated` gives, or DROP."""
    for m in range(len(missing)):
        verdict[m] = rated(now, step, own, missing[m])


def rated(now, step, own, n):
    """Return the precision of the n-th demanded expert, or DROP: the best over all tokens."""
    e, best = step.expert[n] % now["experts"], UNRATED
    for t in range(now["tokens"]):
        for j in range(len(step.ids[t])):
            if step.ids[t][j] == e:
                tier = rated_by_token(own, step.ids[t], step.weight[t], j)
                best = tier if tier != DROP and tier < best else best
    return DROP if best == UNRATED else best


def rated_by_token(own, ids, weights, j):
    """Return the precision that a token gives to its j-th expert, or DROP."""
    ahead = total = 0
    for other in range(len(ids)):
        if ids[other] >= 0:
            total += weights[other]
            heavier = weights[other] > weights[j] or (weights[other] == weights[j] and other < j)
            ahead += weights[other] if heavier else 0
    return scored_tier(ahead, total, own.par[T1], own.par[T2], int(own.par[BITS]) - 1)


def bits(params):
    """Return the high and the low precision; tiers between them are not used."""
    return params["bits"]


POLICY = Miss(
    name="hobbit",
    summary="load at high or low precision or skip, by the gate weights of better experts",
    source="HOBBIT, arXiv 2411.01433 §3.2",
    params=PARAMS,
    needs=always("weights"),
    want=want,
    resolve=resolve,
    bits=bits,
    changes_output=True,
    reads=frozenset({"ids", "weight"}),
)
