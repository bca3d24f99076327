"""LFRU (2608.07911): the expert of smallest frequency / (clock - last use + 1) is evicted.

Frequency is counted over the whole history. The clock counts steps, the source's events, in both contracts (its
sequential replay counts accesses). Ties go by least recent timestamp; the source breaks them by id, or at random.
A prefetch is no use.
"""

from moereplay.policies.blocks import home
from moereplay.policies.contract import Eviction, Memory, expert_of

LAST = 0  # column in the row of an expert's first copy: step of its last use
UNIT = 1 << 32


def on_use(now, experts, copies, own, y):
    """Keep the number of the step."""
    own.rows[home(now, y)][LAST] = now["step"]


def key(now, experts, copies, own, y):
    """Return the uses per step since the last one, in UNITs."""
    age = max(now["step"] - own.rows[home(now, y)][LAST], 0) + 1
    return experts[expert_of(now, y)]["uses_ever"] * UNIT // age


POLICY = Eviction(
    name="lfru",
    summary="evict the expert with the smallest use count per step since the last use",
    source="2608.07911 §2.3 and its simulator",
    memory=Memory(rows=1),
    on_use=on_use,
    key=key,
    key_scope="step",
    reads=frozenset(),
)
