"""Most recently used: the copy whose expert's last use is the newest leaves.

Layers come round in a cycle, which is where least recently used hits nothing once the cache is smaller than the cycle;
leaving with the newest keeps a part of the cycle instead.
"""

from policies.contract import Eviction, expert_of


def key(now, experts, copies, own, y):
    """Minus the stamp of the last use."""
    return -experts[expert_of(now, y)]["last_use"]


POLICY = Eviction(
    name="mru", summary="newest last use leaves", source="Chou & DeWitt, VLDB 1985", key=key, reads=frozenset()
)
