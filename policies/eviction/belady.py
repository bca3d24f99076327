"""Belady: the expert whose next demand is farthest in the future is evicted. A bound, not a policy one can deploy.

Forced admission by default. `bypass=true` rejects an expert whose own next demand is later than every candidate's;
`bypass=ties` also one whose demand is as far, which only two experts that are never demanded again can be.
`window=W` sees the demand of this pass and of W more (SeqMoE predicts eight tokens): beyond it all are equally far and
evicted by least recent timestamp. `window=0` sees everything.
"""

from moereplay.policies.contract import NEVER, Choice, Eviction, Number, always, expert_of, slot

PARAMS = (Choice("bypass", "false", ("false", "true", "ties")), Number("window", 0, 0, 1 << 40, integer=True))
BYPASS, WINDOW = slot(PARAMS, "bypass"), slot(PARAMS, "window")
FALSE, TRUE = 0, 1


def seen(now, own, expert):
    """Return the position of the next demand, NEVER if it is beyond the window."""
    beyond = own.par[WINDOW] > 0 and expert["next_pass"] - now["pass"] > own.par[WINDOW]
    return NEVER if beyond else expert["next_use"]


def key(now, experts, copies, own, y):
    """Return minus that position; among experts never demanded again, the larger id is evicted if nothing is hidden."""
    next_use = seen(now, own, experts[expert_of(now, y)])
    return -next_use - y if next_use == NEVER and own.par[WINDOW] == 0 else -next_use


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Reject a copy that is used again later than the farthest candidate, y_out."""
    incoming = seen(now, own, experts[expert_of(now, y_in)])
    farthest = seen(now, own, experts[expert_of(now, y_out)])
    if own.par[BYPASS] == FALSE or incoming < farthest:
        return True
    return own.par[BYPASS] == TRUE and incoming == farthest


def scope(params):
    """Return the scope: a window moves with every pass."""
    return "pass" if params["window"] else "touch"


def declines(params):
    """Return whether admission may be rejected: it is forced unless bypassing is allowed."""
    return params["bypass"] != "false"


POLICY = Eviction(
    name="belady",
    summary="evict the expert whose next demand is farthest (offline bound)",
    source="Belady 1966; bypass: McFarling 1992; window: SeqMoE 2609.12978",
    params=PARAMS,
    needs=always("future"),
    key=key,
    key_scope=scope,
    admit=admit,
    declines=declines,
    decides_once=True,  # the first victim is the farthest of all,
    reads=frozenset({"next_pass", "next_use"}),
)
