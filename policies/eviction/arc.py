"""ARC (Megiddo & Modha, FAST 2003): balances recency (T1) against frequency (T2) by hits in their ghost lists B1, B2.

Sizes are bytes; the target of T1 grows by max(1, B2/B1) incoming sizes on a ghost hit in B1, and shrinks likewise.
A prefetched copy enters T1, or T2 if it was a ghost that the CPU has run since, and stays there at its first use: a
prefetch does not count as a use.
"""

from moereplay.policies.blocks import (
    LIST,
    REGISTERS_PER_LIST,
    ROW_COLUMNS,
    held,
    move,
    oldest,
    oldest_candidate,
    push,
    unlink,
)
from moereplay.policies.contract import Eviction, Memory

T1, T2, B1, B2 = 1, 2, 3, 4
GHOST_HIT = ROW_COLUMNS  # row column: B1 or B2 from a ghost's use until it comes in
LEAVES_NO_GHOST = 4 * REGISTERS_PER_LIST  # register
TARGET = 0  # real: bytes that T1 may keep


def on_use(now, experts, copies, own, y):
    """Move a hit to T2; adapt the target to a ghost hit, which will enter T2."""
    pool, size, where = copies[y]["pool"], copies[y]["bytes"], own.rows[y][LIST]
    if where == T1 or where == T2:
        move(copies, own, y, where if copies[y]["prefetched"] == 1 else T2)
    elif where == B1 or where == B2:
        adapt(own, pool, where, size)
        unlink(own, pool, y, size)
        own.rows[y][GHOST_HIT] = where


def adapt(own, pool, where, size):
    """Move the target towards the side whose ghost was hit."""
    other = B2 if where == B1 else B1
    step = max(held(own, pool, other) / held(own, pool, where), 1.0) * size
    target = own.reals[pool][TARGET]
    if where == B1:
        own.reals[pool][TARGET] = min(target + step, float(own.capacity[pool]))
    else:
        own.reals[pool][TARGET] = max(target - step, 0.0)


def on_insert(now, experts, copies, own, y, prefetched):
    """Insert a former ghost into T2, anything else into T1."""
    pool, size = copies[y]["pool"], copies[y]["bytes"]
    if own.rows[y][LIST] == B1 or own.rows[y][LIST] == B2:
        unlink(own, pool, y, size)
    push(own, pool, T2 if own.rows[y][GHOST_HIT] > 0 else T1, y, size)
    own.rows[y][GHOST_HIT] = 0


def victim(now, experts, copies, own, pool, y_in):
    """Trim the ghosts, then REPLACE; where T1 is full and B1 empty, evict T1's oldest without a ghost."""
    size, ghost_hit = copies[y_in]["bytes"], own.rows[y_in][GHOST_HIT]
    own.regs[pool][LEAVES_NO_GHOST] = 0
    if ghost_hit > 0:
        return replace(copies, own, pool, ghost_hit)
    if held(own, pool, T1) + held(own, pool, B1) + size > own.capacity[pool]:
        if oldest(own, pool, B1) < 0:
            own.regs[pool][LEAVES_NO_GHOST] = 1
            return first_of(copies, own, pool, T1, T2)
        forget(copies, own, pool, B1)
    elif (
        held(own, pool, T1) + held(own, pool, B1) + held(own, pool, T2) + held(own, pool, B2) >= 2 * own.capacity[pool]
    ):
        forget(copies, own, pool, B2)
    return replace(copies, own, pool, ghost_hit)


def replace(copies, own, pool, ghost_hit):
    """Evict from T1 while it exceeds its target (or meets it, for a ghost hit in B2), else from T2."""
    size, target = held(own, pool, T1), own.reals[pool][TARGET]
    if size > 0 and (size > target or (size == target and ghost_hit == B2)):
        return first_of(copies, own, pool, T1, T2)
    return first_of(copies, own, pool, T2, T1)


def first_of(copies, own, pool, preferred, other):
    """Return the oldest candidate of the preferred list, else of the other: protected copies may fill one."""
    y = oldest_candidate(copies, own, pool, preferred)
    return y if y >= 0 else oldest_candidate(copies, own, pool, other)


def forget(copies, own, pool, ghosts):
    """Drop the oldest ghost, if there is one."""
    y = oldest(own, pool, ghosts)
    if y >= 0:
        unlink(own, pool, y, copies[y]["bytes"])


def on_evict(now, experts, copies, own, y):
    """Turn the evicted copy into a ghost of its list."""
    pool, size, where = copies[y]["pool"], copies[y]["bytes"], own.rows[y][LIST]
    unlink(own, pool, y, size)
    if own.regs[pool][LEAVES_NO_GHOST] == 0:
        push(own, pool, B1 if where == T1 else B2, y, size)


POLICY = Eviction(
    name="arc",
    summary="adapts between recency and frequency",
    source="Megiddo & Modha, FAST 2003",
    memory=Memory(rows=ROW_COLUMNS + 1, regs=4 * REGISTERS_PER_LIST + 1, reals=1),
    on_use=on_use,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
