"""LIRS (Jiang & Zhang, SIGMETRICS 2002): experts whose last two uses lie close together stay; a small queue has others.

LIR copies fill the pool but for a share `hir` of its bytes, or one expert if that is more; the rest is a queue of
resident HIR copies, the oldest of which is evicted. The stack is everything, resident or not, whose last use is newer
than that of the least recent LIR copy: the paper's stack after pruning, without a bound on its length. A use finds the
expert in the stack: it becomes LIR, and the least recent LIR copies go to the newest end of the queue. Else it is HIR,
and goes there itself. While LIR copies have room, every used copy is one of them. With `hir=1` this is LRU.

A missing expert becomes the most recent when it arrives, by the status that its use found. A prefetch is not a use: it
enters the queue, unless the CPU has run the expert from within the stack before. If all of the queue is pinned, the
least recent LIR copy is evicted.
"""

from moereplay.policies.blocks import (
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
from moereplay.policies.contract import Eviction, Memory, Number, slot

PARAMS = (Number("hir", 0.01, 0, 1),)
SHARE = slot(PARAMS, "hir")
LIR, HIR = 1, 2
LAST = ROW_COLUMNS  # row column: logical timestamp of the last use
RETURNS = ROW_COLUMNS + 1  # row column: 1 if that use found the copy absent, and in the stack
CLOCK = 2 * REGISTERS_PER_LIST  # register: the newest logical timestamp


def on_use(now, experts, copies, own, y):
    """Renew the copy's place, and give it the status that its distance from the last use earns."""
    pool, where, recent = copies[y]["pool"], own.rows[y][LIST], in_stack(copies, own, y)
    renew(own, pool, y)
    if where == NOWHERE:
        own.rows[y][RETURNS] = 1 if recent else 0
    elif where == LIR or recent or fits(copies, own, y):
        move(copies, own, y, LIR)
        demote(copies, own, y)
    else:
        move(copies, own, y, HIR)


def on_insert(now, experts, copies, own, y, prefetched):
    """Enter by the status of the use that fetched it."""
    pool, row = copies[y]["pool"], own.rows[y]
    is_lir = row[RETURNS] == 1 or (prefetched == 0 and fits(copies, own, y))
    if is_lir or prefetched == 0:
        renew(own, pool, y)
    push(own, pool, LIR if is_lir else HIR, y, copies[y]["bytes"])
    row[RETURNS] = 0
    demote(copies, own, y)


def renew(own, pool, y):
    """Make y the most recent of its pool."""
    own.regs[pool][CLOCK] += 1
    own.rows[y][LAST] = own.regs[pool][CLOCK]


def in_stack(copies, own, y):
    """Return whether the last use of y is newer than that of the least recent LIR copy."""
    bottom = oldest(own, copies[y]["pool"], LIR)
    return bottom >= 0 and own.rows[y][LAST] > own.rows[bottom][LAST]


def room(copies, own, y):
    """Return the bytes of LIR copies, of which the queue leaves as many as it can hold y with."""
    capacity = own.capacity[copies[y]["pool"]]
    return capacity - max(int(capacity * own.par[SHARE]), copies[y]["bytes"])


def fits(copies, own, y):
    """Return whether y can be LIR without another's loss."""
    return held(own, copies[y]["pool"], LIR) + copies[y]["bytes"] <= room(copies, own, y)


def demote(copies, own, y):
    """Move the least recent LIR copies to the queue until the others, y among them, have room."""
    pool = copies[y]["pool"]
    while held(own, pool, LIR) > room(copies, own, y):
        move(copies, own, oldest(own, pool, LIR), HIR)


def victim(now, experts, copies, own, pool, y_in):
    """Return the oldest candidate of the queue, or else the least recent LIR copy that is one."""
    y = oldest_candidate(copies, own, pool, HIR)
    return y if y >= 0 else oldest_candidate(copies, own, pool, LIR)


def on_evict(now, experts, copies, own, y):
    """Unlink the copy; the time of its last use stays."""
    unlink(own, copies[y]["pool"], y, copies[y]["bytes"])


POLICY = Eviction(
    name="lirs",
    summary="keep experts whose last two uses lie close together; a small queue has the others",
    source="Jiang & Zhang, SIGMETRICS 2002",
    params=PARAMS,
    memory=Memory(rows=ROW_COLUMNS + 2, regs=2 * REGISTERS_PER_LIST + 1),
    on_use=on_use,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
