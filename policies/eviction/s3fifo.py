"""S3-FIFO (Yang et al., SOSP 2023): a small FIFO queue keeps experts that are used once out of the main queue.

New copies enter `small`. Room is made from `small` while the main queue is within its bytes: its oldest goes to the
main queue if it was used `threshold` times or more, unmarked, else it is evicted and remembered in `ghost`. In the main
queue the oldest goes round again for one of its uses, of which three count, and is evicted without. A ghost that
returns enters the main queue. `small` and `ghost` are shares of the pool's bytes. Where algorithm 1 trims a full main
queue as something enters it, libCacheSim and this leave that to the next eviction.

The cache fills first: `fill=small` (the paper) lets the small queue grow meanwhile, `fill=main` (libCacheSim since
2024) puts what it has no room for into the main queue until something has left. A prefetch is no use: it enters
`small`, ghost or not, unless the CPU has run the ghost meanwhile, and its first use leaves it unmarked. What is pinned
is passed over and keeps its place.
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
from moereplay.policies.contract import Choice, Eviction, Memory, Number, slot

PARAMS = (
    Number("small", 0.1, 0, 1),
    Number("ghost", 0.9, 0, 4),
    Number("threshold", 2, 1, 8, integer=True),
    Choice("fill", "small", ("small", "main")),
)
SMALL_SHARE, GHOST_SHARE = slot(PARAMS, "small"), slot(PARAMS, "ghost")
THRESHOLD, FILL = slot(PARAMS, "threshold"), slot(PARAMS, "fill")
FILL_MAIN = 1
SMALL, MAIN, GHOST = 1, 2, 3
USES = ROW_COLUMNS  # row column: since it entered its queue, or went round
RETURNS = ROW_COLUMNS + 1  # row column: 1 from a ghost's use until it comes in
HAS_EVICTED = 3 * REGISTERS_PER_LIST  # register
MOST_ROUNDS = 3


def room(own, pool, share):
    """Return the bytes of a share of the pool."""
    return int(own.capacity[pool] * own.par[share])


def on_use(now, experts, copies, own, y):
    """Count a hit; a ghost will enter the main queue."""
    where = own.rows[y][LIST]
    if where == GHOST:
        unlink(own, copies[y]["pool"], y, copies[y]["bytes"])
        own.rows[y][RETURNS] = 1
    elif where > 0 and copies[y]["prefetched"] == 0:
        own.rows[y][USES] += 1


def on_insert(now, experts, copies, own, y, prefetched):
    """Insert a former ghost into the main queue, anything else into the small one."""
    pool, size = copies[y]["pool"], copies[y]["bytes"]
    if own.rows[y][LIST] == GHOST:
        unlink(own, pool, y, size)
    full = held(own, pool, SMALL) >= room(own, pool, SMALL_SHARE)
    overflows = own.par[FILL] == FILL_MAIN and own.regs[pool][HAS_EVICTED] == 0 and full
    push(own, pool, MAIN if own.rows[y][RETURNS] == 1 or overflows else SMALL, y, size)
    own.rows[y][USES], own.rows[y][RETURNS] = 0, 0


def victim(now, experts, copies, own, pool, y_in):
    """Select from the small queue unless the main one exceeds its share; from the other if all are in use."""
    main_room = own.capacity[pool] - room(own, pool, SMALL_SHARE)
    y = -1
    if held(own, pool, MAIN) <= main_room:
        y = from_small(copies, own, pool)
    if y < 0:
        y = from_main(copies, own, pool)
    if y < 0:
        y = from_small(copies, own, pool)
    return y if y >= 0 else from_main(copies, own, pool)


def from_small(copies, own, pool):
    """Return the oldest candidate that was hardly used, moving others to the main queue; -1 if none is left."""
    while True:
        y = oldest_candidate(copies, own, pool, SMALL)
        if y < 0 or own.rows[y][USES] < own.par[THRESHOLD]:
            return y
        requeue(copies, own, y, 0)


def from_main(copies, own, pool):
    """Return the oldest candidate without a use left, requeueing others; -1 if all are in use."""
    while True:
        y = oldest_candidate(copies, own, pool, MAIN)
        if y < 0 or own.rows[y][USES] == 0:
            return y
        requeue(copies, own, y, min(own.rows[y][USES], MOST_ROUNDS) - 1)


def requeue(copies, own, y, uses):
    """Make y the newest of the main queue, with the given number of uses left."""
    move(copies, own, y, MAIN)
    own.rows[y][USES] = uses


def on_evict(now, experts, copies, own, y):
    """Make a copy evicted from the small queue a ghost; forget the oldest ghosts."""
    pool, size, where = copies[y]["pool"], copies[y]["bytes"], own.rows[y][LIST]
    own.regs[pool][HAS_EVICTED] = 1
    unlink(own, pool, y, size)
    if where == SMALL:
        push(own, pool, GHOST, y, size)
    while held(own, pool, GHOST) > room(own, pool, GHOST_SHARE):
        forgotten = oldest(own, pool, GHOST)
        unlink(own, pool, forgotten, copies[forgotten]["bytes"])


POLICY = Eviction(
    name="s3fifo",
    summary="a small FIFO queue before a main one, and ghosts",
    source="Yang et al., SOSP 2023, and libCacheSim",
    params=PARAMS,
    memory=Memory(rows=ROW_COLUMNS + 2, regs=3 * REGISTERS_PER_LIST + 1),
    on_use=on_use,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
