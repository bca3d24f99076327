"""Class LRU (llama.cpp): age counts less the more often an expert is used; the largest age / 2**class is evicted.

class = floor(log2(f)), from 0 to 7, of a use count f that halves every `half_life` tokens. Age is in tokens of the run
since the last use or arrival; `touch_on_predict=true` resets the age of a resident that a prefetch suggests. Counts are
kept through evictions; a prefetch adds nothing to them.
"""

from moereplay.policies.blocks import ONE, home, left
from moereplay.policies.contract import Choice, Eviction, HalfLife, Memory, slot

PARAMS = (
    HalfLife("half_life", 128, 1, 1 << 20, integer=True),
    Choice("touch_on_predict", "false", ("false", "true")),
)
HALF_LIFE, TOUCH = slot(PARAMS, "half_life"), slot(PARAMS, "touch_on_predict")
TRUE = 1
HIGHEST = 7  # class
COUNT, SINCE, SEEN = 0, 1, 2  # columns in the row of an expert's first copy: count at its last use in ONEs, clocks


def on_use(now, experts, copies, own, y):
    """Return the decayed count plus one."""
    row = own.rows[home(now, y)]
    row[COUNT] = int(row[COUNT] * left(own.par[HALF_LIFE + 1], now["clock"] - row[SINCE])) + ONE
    row[SINCE] = row[SEEN] = now["clock"]


def on_insert(now, experts, copies, own, y, prefetched):
    """Reset the age of an arrival."""
    own.rows[home(now, y)][SEEN] = now["clock"]


def on_predict(now, experts, copies, own, y):
    """Reset the age at a prediction, with `touch_on_predict`."""
    if own.par[TOUCH] == TRUE:
        own.rows[home(now, y)][SEEN] = now["clock"]


def key(now, experts, copies, own, y):
    """Return minus the age in 2**-HIGHEST tokens, divided by 2**class."""
    row = own.rows[home(now, y)]
    count = row[COUNT] * left(own.par[HALF_LIFE + 1], now["clock"] - row[SINCE]) / ONE
    above = HIGHEST
    while count >= 2.0 and above > 0:
        count /= 2.0
        above -= 1
    return -((now["clock"] - row[SEEN]) << above)


POLICY = Eviction(
    name="class_lru",
    summary="evict the expert with the largest age over a power of two that grows with use",
    source="llama.cpp, expert cache",
    params=PARAMS,
    memory=Memory(rows=3),
    on_use=on_use,
    on_insert=on_insert,
    on_predict=on_predict,
    key=key,
    key_scope="pass",
    reads=frozenset(),
)
