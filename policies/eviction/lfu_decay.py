"""LFU with decay: every use counts 1 when it happens and half as much per `half_life` tokens; the least is evicted.

This is LRFU (Lee et al., IEEE ToC 2001) with F(t) = 2**(-t / half_life): a short half-life is LRU, a long one LFU.
Time is counted in tokens of the run before this pass. Counts survive evictions; a prefetch does not count as a use.
"""

from moereplay.policies.blocks import BITS, ONE, home, left, log2
from moereplay.policies.contract import NEVER, Eviction, HalfLife, Memory, slot

PARAMS = (HalfLife("half_life", 128, 1, 1 << 20, integer=True),)
HALF_LIFE = slot(PARAMS, "half_life")
COUNT, SINCE = 0, 1  # columns in the row of an expert's first copy: the count at its last use, in ONEs, and when


def on_use(now, experts, copies, own, y):
    """Return the decayed count plus one."""
    row = own.rows[home(now, y)]
    row[COUNT] = int(row[COUNT] * left(own.par[HALF_LIFE + 1], now["clock"] - row[SINCE])) + ONE
    row[SINCE] = now["clock"]


def key(now, experts, copies, own, y):
    """Return log2(count) + since / half_life: all counts decay alike, so their order does not depend on the time."""
    row = own.rows[home(now, y)]
    if row[COUNT] == 0:
        return -NEVER
    return log2(row[COUNT]) + (row[SINCE] << BITS) // int(own.par[HALF_LIFE])


POLICY = Eviction(
    name="lfu_decay",
    summary="evict the expert with the smallest use count; counts halve every half_life tokens",
    source="LRFU: Lee et al., IEEE Transactions on Computers 2001",
    params=PARAMS,
    memory=Memory(rows=2),
    on_use=on_use,
    key=key,
    reads=frozenset(),
)
