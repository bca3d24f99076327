"""Drop below: a missing expert whose gate weight is less than f / k is skipped (BigMoeOnEdge's cold experts).

The authors' models renormalise, so that 1 / k is the mean weight. `of=weight` uses unmodified gate weights,
`of=share` their share of the token's sum, which is the same there and meaningful elsewhere. The maximum over the pass's
tokens decides.
"""

from moereplay.policies.contract import DROP, UNIT, Choice, Miss, Number, always, slot

PARAMS = (Number("f", 1.0, 0, 64), Choice("of", "weight", ("weight", "share")))
F, OF = slot(PARAMS, "f"), slot(PARAMS, "of")
SHARE = 1


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Fetch the experts that matter to any token."""
    for m in range(len(missing)):
        verdict[m] = 0 if matters(now, step, own, missing[m]) else DROP


def matters(now, step, own, n):
    """Return whether the n-th demanded expert reaches f / k in any token."""
    if own.par[OF] != SHARE:
        return step.mass[n] * now["k"] >= own.par[F] * UNIT
    e = step.expert[n] % now["experts"]
    for t in range(now["tokens"]):
        own_weight, total = weight_of(step.ids[t], step.weight[t], e)
        if own_weight >= 0 and own_weight * now["k"] >= own.par[F] * total:
            return True
    return False


def weight_of(ids, weights, e):
    """Return (weight of e, sum of weights) of a token; -1 if it does not use e."""
    found, total = -1, 0
    for j in range(len(ids)):
        if ids[j] >= 0:
            total += weights[j]
            found = weights[j] if ids[j] == e else found
    return found, total


POLICY = Miss(
    name="drop_below",
    summary="skip a miss whose gate weight is below f / k",
    source="BigMoeOnEdge, github.com/Helldez/BigMoeOnEdge (cold-expert dropping)",
    params=PARAMS,
    needs=always("weights"),
    resolve=resolve,
    changes_output=True,
    reads=frozenset({"ids", "mass", "weight"}),
)
