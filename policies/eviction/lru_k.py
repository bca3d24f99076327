"""LRU-K (O'Neil, O'Neil & Weikum, SIGMOD 1993): the expert whose K-th most recent use is the oldest is evicted.

An expert with fewer than K uses is infinitely old and is evicted first; among these a subsidiary policy
decides, `among=lru` (the paper's example) or `fifo` (libCacheSim's). The paper remembers uses for a while after
eviction: `history=kept` for ever, `resident` not at all, so that of uses on the CPU the last alone is known. Its
correlated reference period is zero here: an expert is used at most once a step. A prefetch does not count as a use.
"""

from moereplay.policies.blocks import home, is_here
from moereplay.policies.contract import NEVER, Choice, Eviction, Memory, Number, expert_of, slot

PARAMS = (
    Number("k", 2, 1, 8, integer=True),
    Choice("history", "kept", ("kept", "resident")),
    Choice("among", "lru", ("lru", "fifo")),
)
K, HISTORY, AMONG = slot(PARAMS, "k"), slot(PARAMS, "history"), slot(PARAMS, "among")
MOST = 8  # columns of timestamps, the newest first, in the row of an expert's first copy
RESIDENT_ONLY = FIFO = 1


def on_use(now, experts, copies, own, y):
    """Shift the timestamps of the expert's uses."""
    row, expert = own.rows[home(now, y)], experts[expert_of(now, y)]
    begins = own.par[HISTORY] == RESIDENT_ONLY and expert["uses_here"] == 1
    for use in range(MOST - 1, 0, -1):
        row[use] = 0 if begins else row[use - 1]
    row[0] = expert["last_use"]


def on_evict(now, experts, copies, own, y):
    """Forget, if uses are remembered in residence only; another copy may still be here."""
    if own.par[HISTORY] == RESIDENT_ONLY and not is_here(now, copies, y):
        for use in range(MOST):
            own.rows[home(now, y)][use] = 0


def key(now, experts, copies, own, y):
    """Return the timestamp of the K-th most recent use; below all timestamps where there is none."""
    kth = own.rows[home(now, y)][int(own.par[K]) - 1]
    if kth > 0:
        return kth
    return copies[y]["entered"] - NEVER if own.par[AMONG] == FIFO else -NEVER


POLICY = Eviction(
    name="lru_k",
    summary="evict the expert whose K-th most recent use is oldest",
    source="O'Neil, O'Neil & Weikum, SIGMOD 1993",
    params=PARAMS,
    memory=Memory(rows=MOST),
    on_use=on_use,
    on_evict=on_evict,
    key=key,
    reads=frozenset(),
)
