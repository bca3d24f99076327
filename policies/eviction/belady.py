"""Belady: the expert whose next demand is farthest in the future leaves. A bound, not a policy one can deploy.

Forced admission by default. `bypass=true` declines an expert whose own next demand is later than every candidate's;
`bypass=ties` also one whose demand is as far, which only two experts that are never demanded again can be.
"""

from policies.contract import NEVER, Choice, Eviction, always, slot

PARAMS = (Choice("bypass", "false", ("false", "true", "ties")),)
BYPASS = slot(PARAMS, "bypass")
FALSE, TRUE = 0, 1


def key(now, experts, copies, own, y):
    """Minus the position of the next demand; among those never demanded again the larger id leaves."""
    next_use = experts[y // now["precisions"]]["next_use"]
    return -next_use - y if next_use == NEVER else -next_use


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Decline what comes back later than the farthest candidate, which y_out is."""
    incoming = experts[y_in // now["precisions"]]["next_use"]
    farthest = experts[y_out // now["precisions"]]["next_use"]
    if own.par[BYPASS] == FALSE or incoming < farthest:
        return True
    return own.par[BYPASS] == TRUE and incoming == farthest


POLICY = Eviction(
    name="belady",
    summary="farthest next demand leaves (offline bound)",
    source="Belady 1966; bypass: McFarling 1992",
    params=PARAMS,
    needs=always("future"),
    key=key,
    admit=admit,
)
