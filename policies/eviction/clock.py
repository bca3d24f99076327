"""CLOCK (Corbató 1968), also second chance and FIFO-reinsertion: a FIFO queue that gives used copies another round.

The oldest is evicted unless it was used since it entered or was last passed over; then it loses one mark and goes to
the newest end. `bits` lets a copy keep up to 2**bits - 1 marks. A prefetch does not count as a use: the first use
leaves the copy unmarked; `touch_on_predict=true` marks a resident that a prefetch suggests. A pinned copy keeps its
marks as it is passed over.
"""

from moereplay.policies.blocks import LIST, REGISTERS_PER_LIST, ROW_COLUMNS, move, oldest, push, unlink
from moereplay.policies.contract import RESIDENT, Choice, Eviction, Memory, Number, slot

PARAMS = (Number("bits", 1, 1, 8, integer=True), Choice("touch_on_predict", "false", ("false", "true")))
BITS, TOUCH = slot(PARAMS, "bits"), slot(PARAMS, "touch_on_predict")
TRUE = 1
QUEUE = 1
MARKS = ROW_COLUMNS  # row column


def on_use(now, experts, copies, own, y):
    """Add a mark at a hit."""
    if own.rows[y][LIST] == QUEUE and copies[y]["prefetched"] == 0:
        mark(own, y)


def on_predict(now, experts, copies, own, y):
    """Add a mark at a prediction, with `touch_on_predict`."""
    if own.rows[y][LIST] == QUEUE and own.par[TOUCH] == TRUE:
        mark(own, y)


def mark(own, y):
    """Add a mark, up to the counter's end."""
    own.rows[y][MARKS] = min(own.rows[y][MARKS] + 1, (1 << int(own.par[BITS])) - 1)


def on_insert(now, experts, copies, own, y, prefetched):
    """Enter at the newest end, unmarked."""
    push(own, copies[y]["pool"], QUEUE, y, copies[y]["bytes"])
    own.rows[y][MARKS] = 0


def victim(now, experts, copies, own, pool, y_in):
    """Return the oldest candidate without a mark; marks are spent on the way."""
    while True:
        y = oldest(own, pool, QUEUE)
        if copies[y]["protected"] == 0 and copies[y]["state"] == RESIDENT:
            if own.rows[y][MARKS] == 0:
                return y
            own.rows[y][MARKS] -= 1
        move(copies, own, y, QUEUE)


def on_evict(now, experts, copies, own, y):
    """Unlink the copy from the queue."""
    unlink(own, copies[y]["pool"], y, copies[y]["bytes"])


POLICY = Eviction(
    name="clock",
    summary="a FIFO queue with a second chance for used experts",
    source="Corbató 1968; bits as in libCacheSim",
    params=PARAMS,
    memory=Memory(rows=ROW_COLUMNS + 1, regs=REGISTERS_PER_LIST),
    on_use=on_use,
    on_predict=on_predict,
    on_insert=on_insert,
    on_evict=on_evict,
    victim=victim,
    reads=frozenset(),
)
