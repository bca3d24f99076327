"""Belady: the expert whose next demand is farthest in the future leaves. A bound, not a policy one can deploy.

Forced admission by default; `bypass=true` declines an expert whose own next demand is later than every candidate's.
"""

from policies.contract import NEVER, Choice, Eviction, slot

PARAMS = (Choice("bypass", "false", ("false", "true")),)
BYPASS = slot(PARAMS, "bypass")
TRUE = 1


def key(now, experts, copies, own, y):
    """Minus the position of the next demand; among those never demanded again the larger id leaves."""
    next_use = experts[y // now["precisions"]]["next_use"]
    return -next_use - y if next_use == NEVER else -next_use


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Decline what comes back strictly later than the farthest candidate."""
    incoming = experts[y_in // now["precisions"]]["next_use"]
    return own.par[BYPASS] != TRUE or incoming <= experts[y_out // now["precisions"]]["next_use"]


def needs(params):
    """The demand of the rest of the run."""
    return frozenset({"future"})


POLICY = Eviction(
    name="belady",
    summary="farthest next demand leaves (offline bound)",
    source="Belady 1966; bypass: McFarling 1992",
    params=PARAMS,
    needs=needs,
    key=key,
    admit=admit,
)
