"""Substitute: a resident expert of similar score takes the place of a missing one, token by token.

What finds no substitute is fetched, at one precision like everything else; `bits=0` as stored.
"""

from moereplay.policies.contract import NONE, PER_TOKEN, UNIT, Miss, Number, always, slot

PARAMS = (Number("tolerance", 0.05, 0, 1), Number("bits", 0, 0, 32))
TOLERANCE = slot(PARAMS, "tolerance")


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Leave the decision to each token."""
    for m in range(len(missing)):
        verdict[m] = PER_TOKEN


def substitute(now, step, experts, copies, own, t, j, eligible):
    """Return the best resident expert within `tolerance` of the missing one, outside the token's mixture; or NONE."""
    scores = step.gate[t]
    best = NONE
    floor = scores[step.ids[t][j]] - own.par[TOLERANCE] * UNIT
    for e in range(now["experts"]):
        if eligible[e] == 1 and scores[e] >= floor and (best == NONE or scores[e] > scores[best]):
            best = e
    return best


def bits(params):
    """Return the one precision; 0 is the trace's own."""
    return () if params["bits"] == 0 else (params["bits"],)


POLICY = Miss(
    name="substitute",
    summary="run a resident expert of similar score instead",
    source="SpecMD §3.1.2 Substitution-score",
    params=PARAMS,
    needs=always("logits"),
    resolve=resolve,
    substitute=substitute,
    bits=bits,
    changes_output=True,
    reads=frozenset({"ids"}),
)
