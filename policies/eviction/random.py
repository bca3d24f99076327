"""Random: every candidate is equally likely to be evicted; the floor that a policy must beat.

The residents of each pool are in a list without order. A victim is drawn from it by its place, and what is pinned is
drawn again, so a draw does not depend on the size of the pool.
"""

from moereplay.policies.blocks import counter_hash
from moereplay.policies.contract import Eviction, Memory

PLACE, LISTED = 0, 1  # row columns: a copy's place in the lists; the copy that is listed at the row's place
FIRST, MANY, DRAWS = 0, 1, 2  # registers: a pool's first place, its residents, its draws since the start or reset
IS_LAID_OUT = 3  # register of pool 0


def on_insert(now, experts, copies, own, y, prefetched):
    """Append an arrival to its pool's list."""
    if own.regs[0][IS_LAID_OUT] == 0:
        lay_out(copies, own)
    registers = own.regs[copies[y]["pool"]]
    put(own, registers[FIRST] + registers[MANY], y)
    registers[MANY] += 1


def lay_out(copies, own):
    """Give each pool as many places as it has copies."""
    for y in range(len(copies)):
        own.regs[copies[y]["pool"]][MANY] += 1
    place = 0
    for pool in range(len(own.capacity)):
        own.regs[pool][FIRST] = place
        place += own.regs[pool][MANY]
        own.regs[pool][MANY] = 0
    own.regs[0][IS_LAID_OUT] = 1


def put(own, place, y):
    """List a copy at a place."""
    own.rows[place][LISTED], own.rows[y][PLACE] = y, place


def on_evict(now, experts, copies, own, y):
    """Fill the gap with the last of the list."""
    registers = own.regs[copies[y]["pool"]]
    registers[MANY] -= 1
    put(own, own.rows[y][PLACE], own.rows[registers[FIRST] + registers[MANY]][LISTED])


def victim(now, experts, copies, own, pool, y_in):
    """Draw until the copy is a candidate."""
    registers = own.regs[pool]
    while True:
        registers[DRAWS] += 1
        drawn = counter_hash(now["seed"], now["pass"], pool, registers[DRAWS]) % registers[MANY]
        y = own.rows[registers[FIRST] + drawn][LISTED]
        if copies[y]["protected"] == 0:
            return y


POLICY = Eviction(
    name="random",
    summary="evict an expert at random",
    source="Belady 1966",
    memory=Memory(rows=2, regs=4),
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
