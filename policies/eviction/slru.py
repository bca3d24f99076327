"""Segmented LRU (Karedla, Love & Wherry, 1994): reused copies are kept in separate segments.

A miss enters the lowest segment, the probation; a hit moves a copy one segment up, where the oldest of a segment that
is now too large goes down again. The oldest of the lowest segment that is not empty is evicted.
`segments=4:protected=.75` is S4LRU (Huang et al., SOSP 2013). The upper segments share `protected` of the pool's bytes
equally.

The cache fills first: `fill=probation` (Karedla) lets the probation grow meanwhile, `fill=lowest` (libCacheSim) puts a
miss into the lowest segment with room. A prefetch is no use: the first use of what it brought moves nothing up;
`touch_on_predict=true` makes a resident that it suggests the newest of its segment.
"""

from moereplay.policies.contract import Choice, Eviction, Memory, Number, slot
from moereplay.policies.lists import (
    LIST,
    NOWHERE,
    REGISTERS_PER_LIST,
    ROW_COLUMNS,
    held,
    move,
    oldest,
    oldest_candidate,
    push,
    unlink,
)

PARAMS = (
    Number("segments", 2, 2, 8, integer=True),
    Number("protected", 0.5, 0, 1),
    Choice("fill", "probation", ("probation", "lowest")),
    Choice("touch_on_predict", "false", ("false", "true")),
)
SEGMENTS, PROTECTED = slot(PARAMS, "segments"), slot(PARAMS, "protected")
FILL, TOUCH = slot(PARAMS, "fill"), slot(PARAMS, "touch_on_predict")
MOST_SEGMENTS = 8
LOWEST = TRUE = 1


def room(own, pool, segment):
    """Return the bytes that a segment may hold; segment 1 (probation) has the rest."""
    each = int(own.capacity[pool] * own.par[PROTECTED] / (own.par[SEGMENTS] - 1))
    return each if segment > 1 else own.capacity[pool] - each * (int(own.par[SEGMENTS]) - 1)


def on_use(now, experts, copies, own, y):
    """Move a hit up; the first use of a prefetched copy only refreshes it."""
    segment = own.rows[y][LIST]
    if segment != NOWHERE:
        up = copies[y]["prefetched"] == 0 and segment < own.par[SEGMENTS]
        raise_to(copies, own, y, segment + 1 if up else segment)


def on_predict(now, experts, copies, own, y):
    """Count a prediction as a use, with `touch_on_predict`."""
    if own.rows[y][LIST] != NOWHERE and own.par[TOUCH] == TRUE:
        raise_to(copies, own, y, own.rows[y][LIST])


def raise_to(copies, own, y, segment):
    """Make y the newest of a segment, and demote the copies that no longer fit."""
    pool = copies[y]["pool"]
    move(copies, own, y, segment)
    while segment > 1:
        while held(own, pool, segment) > room(own, pool, segment):
            move(copies, own, oldest(own, pool, segment), segment - 1)
        segment -= 1


def on_insert(now, experts, copies, own, y, prefetched):
    """Enter the probation, or under `fill=lowest` the lowest segment with room."""
    pool, size, segment = copies[y]["pool"], copies[y]["bytes"], 1
    if own.par[FILL] == LOWEST:
        while segment <= own.par[SEGMENTS] and held(own, pool, segment) + size > room(own, pool, segment):
            segment += 1
    push(own, pool, segment if segment <= own.par[SEGMENTS] else 1, y, size)


def victim(now, experts, copies, own, pool, y_in):
    """Return the oldest candidate of the lowest segment that has one."""
    segment = 1
    y = oldest_candidate(copies, own, pool, segment)
    while y < 0:
        segment += 1
        y = oldest_candidate(copies, own, pool, segment)
    return y


def on_evict(now, experts, copies, own, y):
    """Unlink the copy from its segment."""
    unlink(own, copies[y]["pool"], y, copies[y]["bytes"])


POLICY = Eviction(
    name="slru",
    summary="LRU in segments; reused experts move up",
    source="Karedla, Love & Wherry, IEEE Computer 1994; Huang et al., SOSP 2013",
    params=PARAMS,
    memory=Memory(rows=ROW_COLUMNS, regs=MOST_SEGMENTS * REGISTERS_PER_LIST),
    on_use=on_use,
    on_predict=on_predict,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
