"""Most recently used: the copy whose expert's last use is the newest is evicted.

Layers come round in a cycle, which is where least recently used hits nothing once the cache is smaller than the cycle;
evicting the newest keeps a part of the cycle.
"""

from moereplay.policies.contract import Eviction, expert_of


def key(now, experts, copies, own, y):
    """Return minus the logical timestamp of the last use."""
    return -experts[expert_of(now, y)]["last_use"]


POLICY = Eviction(
    name="mru",
    summary="evict the expert whose last use is newest",
    source="Chou & DeWitt, VLDB 1985",
    key=key,
    reads=frozenset(),
)
