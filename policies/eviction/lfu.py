"""Least frequently used, counting since residence began (eviction forgets) or over the whole history (SpecMD)."""

from moereplay.policies.contract import Choice, Eviction, expert_of, slot

PARAMS = (Choice("count", "resident", ("resident", "history")),)
COUNT = slot(PARAMS, "count")
HISTORY = 1


def key(now, experts, copies, own, y):
    """Return the number of uses, counted by `count`."""
    expert = experts[expert_of(now, y)]
    if own.par[COUNT] == HISTORY:
        return expert["uses_ever"]
    return expert["uses_here"]


POLICY = Eviction(
    name="lfu",
    summary="evict the expert with the fewest uses",
    source="Aho, Denning & Ullman 1971; SpecMD §3.1.3 (history)",
    params=PARAMS,
    key=key,
    reads=frozenset(),
)
