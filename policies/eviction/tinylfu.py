"""W-TinyLFU (Einziger, Friedman & Manes, ACM ToS 2017): what stays was used more often than what it replaces.

A new copy enters the window, an LRU of a share `window` of the pool's bytes, or one expert if that is more. The rest is
the main part, an SLRU with `protected` of its bytes for what was used again there. What the window has no more room for
enters the main part's probation while there is room. Then it does so only if it was used more often than the next
victim there, which is evicted; else it is evicted itself. What a step uses is pinned: a window holds at least that.
`window=0` is TinyLFU alone: the newcomer must have been used more often than the victim, or the bypass buffer has it.

Uses are counted up to 15, also of absent experts, and all counts are halved when `sample` times as many as the pool has
room for experts were counted. The sources keep counts of millions of keys in a sketch, with a filter for keys that come
once; experts are few, and these counts are exact. A prefetch is not a use; without a window it too must win.
"""

from moereplay.policies.blocks import (
    LIST,
    NOWHERE,
    REGISTERS_PER_LIST,
    ROW_COLUMNS,
    held,
    home,
    move,
    oldest,
    oldest_candidate,
    push,
    unlink,
)
from moereplay.policies.contract import Eviction, Memory, Number, slot

PARAMS = (
    Number("window", 0.01, 0, 1),
    Number("protected", 0.8, 0, 1),
    Number("sample", 10, 1, 1 << 20, integer=True),
)
SHARE, PROTECTED_SHARE, SAMPLE = slot(PARAMS, "window"), slot(PARAMS, "protected"), slot(PARAMS, "sample")
WINDOW, PROBATION, PROTECTED = 1, 2, 3
COUNT = ROW_COLUMNS  # column in the row of an expert's first copy: uses, halved now and then
MOST = 15
COUNTED = 3 * REGISTERS_PER_LIST  # register: uses of the pool since the start, halved with the counts


def on_use(now, experts, copies, own, y):
    """Count, and renew the copy's place; a hit protects it in the main part."""
    pool, where = copies[y]["pool"], own.rows[y][LIST]
    count(now, copies, own, y)
    if where == PROBATION and copies[y]["prefetched"] == 0:
        move(copies, own, y, PROTECTED)
        room = int((own.capacity[pool] - window(copies, own, y)) * own.par[PROTECTED_SHARE])
        while held(own, pool, PROTECTED) > room:
            move(copies, own, oldest(own, pool, PROTECTED), PROBATION)
    elif where != NOWHERE:
        move(copies, own, y, where)


def count(now, copies, own, y):
    """Count a use of y's expert; halve all counts of its pool at the end of a sample."""
    pool, row = copies[y]["pool"], own.rows[home(now, y)]
    row[COUNT] = min(row[COUNT] + 1, MOST)
    own.regs[pool][COUNTED] += 1
    if own.regs[pool][COUNTED] >= int(own.par[SAMPLE]) * max(1, own.capacity[pool] // copies[y]["bytes"]):
        own.regs[pool][COUNTED] //= 2
        for other in range(len(copies)):
            if copies[other]["pool"] == pool:
                own.rows[other][COUNT] //= 2


def window(copies, own, y):
    """Return the bytes of the window, which has room for y at least, or is not there."""
    share = own.par[SHARE]
    return max(int(own.capacity[copies[y]["pool"]] * share), copies[y]["bytes"]) if share > 0 else 0


def on_insert(now, experts, copies, own, y, prefetched):
    """Enter the window, or the probation where there is none."""
    push(own, copies[y]["pool"], WINDOW if own.par[SHARE] > 0 else PROBATION, y, copies[y]["bytes"])


def victim(now, experts, copies, own, pool, y_in):
    """Return the loser of the window's least recent copy, if it has to leave, and the main part's next victim."""
    room = window(copies, own, y_in)
    overflows = held(own, pool, WINDOW) + copies[y_in]["bytes"] > room
    while overflows and moves_on(copies, own, pool, room):
        overflows = held(own, pool, WINDOW) + copies[y_in]["bytes"] > room
    leaving, challenger = oldest_candidate(copies, own, pool, PROBATION), oldest_candidate(copies, own, pool, WINDOW)
    if leaving < 0:
        leaving = oldest_candidate(copies, own, pool, PROTECTED)
    if leaving < 0 or challenger < 0 or not overflows:
        return leaving if leaving >= 0 else challenger
    if uses(now, own, challenger) <= uses(now, own, leaving):
        return challenger
    move(copies, own, challenger, PROBATION)
    return leaving


def moves_on(copies, own, pool, room):
    """Move the window's least recent copy to a main part with room for it; return whether it was moved."""
    y = oldest(own, pool, WINDOW)
    main = held(own, pool, PROBATION) + held(own, pool, PROTECTED)
    if y < 0 or main + copies[y]["bytes"] > own.capacity[pool] - room:
        return False
    move(copies, own, y, PROBATION)
    return True


def uses(now, own, y):
    """Return the count of y's expert."""
    return own.rows[home(now, y)][COUNT]


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Without a window, reject what was not used more often than the victim."""
    return own.par[SHARE] > 0 or uses(now, own, y_in) > uses(now, own, y_out)


def declines(params):
    """Return whether newcomers have to win."""
    return params["window"] == 0


def on_evict(now, experts, copies, own, y):
    """Unlink the copy; its expert's count stays."""
    unlink(own, copies[y]["pool"], y, copies[y]["bytes"])


POLICY = Eviction(
    name="tinylfu",
    summary="a small LRU window; what leaves it stays only if used more often than what it replaces",
    source="W-TinyLFU: Einziger, Friedman & Manes, ACM ToS 2017, and Caffeine",
    params=PARAMS,
    memory=Memory(rows=ROW_COLUMNS + 1, regs=3 * REGISTERS_PER_LIST + 1),
    on_use=on_use,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    admit=admit,
    declines=declines,
    decides_once=True,
    reads=frozenset(),
)
