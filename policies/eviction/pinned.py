"""Pinned: the experts ranked highest by a profile are never evicted, as many as fit in a `share` of the pool.

The others are evicted by `rest`: lru, lfu (uses since arrival) or fifo. If only pinned experts could be
evicted, the incoming expert uses the bypass buffer. The profile is that of `static`.
"""

from moereplay.policies.blocks import PROFILE_PARAMS, is_within, needs, profile
from moereplay.policies.contract import Choice, Eviction, Number, expert_of, slot

PARAMS = (*PROFILE_PARAMS, Number("share", 0.5, 0, 1), Choice("rest", "lru", ("lru", "lfu", "fifo")))
SHARE, REST = slot(PARAMS, "share"), slot(PARAMS, "rest")
LRU, LFU = 0, 1
CLASS = 1 << 60  # larger than any order inside a class


def is_pinned(now, experts, copies, own, y):
    """Return True if the expert is among the best of its pool."""
    return is_within(now, experts, copies, y, own.capacity[copies[y]["pool"]] * own.par[SHARE])


def key(now, experts, copies, own, y):
    """Rank pinned copies last, by rank; the others by `rest`."""
    expert = experts[expert_of(now, y)]
    if is_pinned(now, experts, copies, own, y):
        return CLASS - expert["profile"]
    if own.par[REST] == LRU:
        return expert["last_use"]
    return expert["uses_here"] if own.par[REST] == LFU else copies[y]["entered"]


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Reject a copy that would evict a pinned one."""
    return not is_pinned(now, experts, copies, own, y_out)


POLICY = Eviction(
    name="pinned",
    summary="never evict the best experts of a profile; evict the others by lru, lfu or fifo",
    source="2608.07911 (pinned)",
    params=PARAMS,
    needs=needs,
    key=key,
    admit=admit,
    profile=profile,
    reads=frozenset(),
)
