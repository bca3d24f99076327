"""SIEVE (Zhang et al., NSDI 2024): a FIFO queue and a hand that spares copies used since its last visit.

The hand moves from the oldest towards the newest and stays where it stopped; a hit moves nothing. A prefetch does not
count as a use: the first use leaves the copy unmarked.
"""

from moereplay.policies.blocks import LIST, PREV, REGISTERS_PER_LIST, ROW_COLUMNS, oldest, push, unlink
from moereplay.policies.contract import RESIDENT, Eviction, Memory

QUEUE = 1
USED = ROW_COLUMNS  # row column: used since it entered or the hand last came by
HAND = REGISTERS_PER_LIST  # register: y + 1 of the copy that the hand points at, 0 the oldest


def on_use(now, experts, copies, own, y):
    """Mark the copy as used at a hit."""
    if own.rows[y][LIST] == QUEUE and copies[y]["prefetched"] == 0:
        own.rows[y][USED] = 1


def on_insert(now, experts, copies, own, y, prefetched):
    """Enter at the newest end, unmarked."""
    push(own, copies[y]["pool"], QUEUE, y, copies[y]["bytes"])
    own.rows[y][USED] = 0


def victim(now, experts, copies, own, pool, y_in):
    """Return the first unmarked candidate from the hand on; marks are spent on the way."""
    y = own.regs[pool][HAND] - 1
    if y < 0:
        y = oldest(own, pool, QUEUE)
    while True:
        if copies[y]["protected"] == 0 and copies[y]["state"] == RESIDENT:
            if own.rows[y][USED] == 0:
                break
            own.rows[y][USED] = 0
        y = newer(own, pool, y)
    own.regs[pool][HAND] = own.rows[y][PREV]
    return y


def newer(own, pool, y):
    """Return the next copy towards the newest end, and from there the oldest."""
    following = own.rows[y][PREV] - 1
    return following if following >= 0 else oldest(own, pool, QUEUE)


def on_evict(now, experts, copies, own, y):
    """Unlink the copy from the queue."""
    unlink(own, copies[y]["pool"], y, copies[y]["bytes"])


POLICY = Eviction(
    name="sieve",
    summary="a FIFO queue whose hand spares used experts",
    source="Zhang et al., NSDI 2024",
    memory=Memory(rows=ROW_COLUMNS + 1, regs=REGISTERS_PER_LIST + 1),
    on_use=on_use,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
