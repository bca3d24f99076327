"""Segmented LRU (Karedla, Love & Wherry, 1994): reused copies are kept in separate segments.

A miss enters the lowest segment, the probation; a hit moves a copy one segment up, where the oldest of a segment that
is now too large goes down again. The oldest of the lowest segment that is not empty is evicted.
`segments=4:protected=.75` is S4LRU (Huang et al., SOSP 2013). The upper segments share `protected` of the pool's bytes
equally.

The cache fills first: `fill=probation` (Karedla) lets the probation grow meanwhile, `fill=lowest` (libCacheSim) puts a
miss into the lowest segment with room. A prefetch is no use: the first use of what it brought moves nothing up;
`touch_on_predict=true` makes a resident that it suggests the newest of its segment.

llama.cpp's expert cache is this with `misses=by_id`, as what a layer misses enters in the order of its ids, to lie side
by side: with half protected, in 0.7.0 and before with `protected=0`, which is LRU.
"""

from moereplay.policies.blocks import (
    LIST,
    NEXT,
    NOWHERE,
    PREV,
    REGISTERS_PER_LIST,
    ROW_COLUMNS,
    held,
    move,
    oldest,
    oldest_candidate,
    push,
    unlink,
)
from moereplay.policies.contract import Choice, Eviction, Memory, Number, slot

PARAMS = (
    Number("segments", 2, 2, 8, integer=True),
    Number("protected", 0.5, 0, 1),
    Choice("fill", "probation", ("probation", "lowest")),
    Choice("touch_on_predict", "false", ("false", "true")),
    Choice("misses", "as_they_arrive", ("as_they_arrive", "by_id"), added=True),
)
SEGMENTS, PROTECTED = slot(PARAMS, "segments"), slot(PARAMS, "protected")
FILL, TOUCH, MISSES = slot(PARAMS, "fill"), slot(PARAMS, "touch_on_predict"), slot(PARAMS, "misses")
MOST_SEGMENTS = 8
LOWEST = TRUE = BY_ID = 1
ENTERED = ROW_COLUMNS  # row column: the step of the arrival


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
    own.rows[y][ENTERED] = now["step"]
    if own.par[MISSES] == BY_ID:
        put_by_id(now, copies, own, y)


def put_by_id(now, copies, own, y):
    """Make copies of larger ids that arrived in this step before y newer than y, the smallest id first."""
    moved, older = y, own.rows[y][NEXT] - 1
    while older > y and own.rows[older][ENTERED] == now["step"]:
        moved, older = older, own.rows[older][NEXT] - 1
    while moved != y:
        newer = own.rows[moved][PREV] - 1
        move(copies, own, moved, own.rows[moved][LIST])
        moved = newer


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
    memory=Memory(rows=ROW_COLUMNS + 1, regs=MOST_SEGMENTS * REGISTERS_PER_LIST),
    on_use=on_use,
    on_predict=on_predict,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
