"""Least recently used: the copy whose expert's last use is the oldest leaves."""

from policies.contract import Eviction


def key(now, experts, copies, own, y):
    """The stamp of the last use."""
    return experts[y // now["precisions"]]["last_use"]


POLICY = Eviction(name="lru", summary="oldest last use leaves", source="Denning 1968; SpecMD §3", key=key)
