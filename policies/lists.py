"""Queues threaded through a policy's own rows, for policies whose order is a queue rather than a key.

A copy is in at most one of a pool's lists. Columns of own.rows[y]: PREV, NEXT, LIST; list i of a pool keeps its newest
and oldest member and its bytes in own.regs[pool]. Links hold y + 1, so that zeroed memory is an empty list.
"""

from moereplay.policies.contract import RESIDENT

PREV, NEXT, LIST = 0, 1, 2
ROW_COLUMNS = 3
NEWEST, OLDEST, BYTES = 0, 1, 2
REGISTERS_PER_LIST = 3
NOWHERE = 0  # lists are numbered from 1


def register(which, field):
    """Return the register of a field of list `which`."""
    return (which - 1) * REGISTERS_PER_LIST + field


def push(own, pool, which, y, size):
    """Put y, which is in no list, at the newest end."""
    row, regs = own.rows[y], own.regs[pool]
    newest = regs[register(which, NEWEST)]
    row[PREV], row[NEXT], row[LIST] = 0, newest, which
    if newest:
        own.rows[newest - 1][PREV] = y + 1
    else:
        regs[register(which, OLDEST)] = y + 1
    regs[register(which, NEWEST)] = y + 1
    regs[register(which, BYTES)] += size


def unlink(own, pool, y, size):
    """Take y out of its list."""
    row, regs = own.rows[y], own.regs[pool]
    which, newer, older = row[LIST], row[PREV], row[NEXT]
    if newer:
        own.rows[newer - 1][NEXT] = older
    else:
        regs[register(which, NEWEST)] = older
    if older:
        own.rows[older - 1][PREV] = newer
    else:
        regs[register(which, OLDEST)] = newer
    row[LIST] = NOWHERE
    regs[register(which, BYTES)] -= size


def move(copies, own, y, which):
    """Make y, which is in some list of its pool, the newest of list `which`."""
    pool, size = copies[y]["pool"], copies[y]["bytes"]
    unlink(own, pool, y, size)
    push(own, pool, which, y, size)


def held(own, pool, which):
    """Return the bytes of the copies in a list."""
    return own.regs[pool][register(which, BYTES)]


def oldest(own, pool, which):
    """Return the oldest member, or -1."""
    return own.regs[pool][register(which, OLDEST)] - 1


def oldest_candidate(copies, own, pool, which):
    """Return the oldest evictable member, or -1; members may be in flight, in use, or ghosts."""
    y = oldest(own, pool, which)
    while y >= 0 and (copies[y]["protected"] == 1 or copies[y]["state"] != RESIDENT):
        y = own.rows[y][PREV] - 1
    return y
