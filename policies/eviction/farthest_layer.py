"""Farthest layer: the expert whose layer is farthest from the execution point is evicted."""

from moereplay.policies.contract import Choice, Eviction, expert_of, slot

PARAMS = (Choice("distance", "cyclic", ("cyclic", "absolute")),)
DISTANCE = slot(PARAMS, "distance")
ABSOLUTE = 1


def key(now, experts, copies, own, y):
    """Return minus the distance: forward around the model (HOBBIT), or absolute (SpecMD's likely reading)."""
    ahead = experts[expert_of(now, y)]["layer"] - now["layer"]
    if own.par[DISTANCE] == ABSOLUTE:
        return -abs(ahead)
    return -(ahead if ahead >= 0 else ahead + now["layers"])


POLICY = Eviction(
    name="farthest_layer",
    summary="evict an expert of the farthest layer",
    source="HOBBIT §3.4 (cyclic); SpecMD, FLD (absolute)",
    params=PARAMS,
    key=key,
    key_scope="layer",
    reads=frozenset(),
)
