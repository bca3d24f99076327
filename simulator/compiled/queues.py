"""Victim selection by the oldest logical timestamp: queues in place of keys.

Each pool has a ring of its copies through a node of its own, which stands behind the last and before the first; a copy
in no queue is a ring of itself. By last use, a copy is queued at the gate that sets its timestamp, so before it has
arrived: it is pinned until then.
"""

from __future__ import annotations

from moereplay.policies.contract import QUEUES
from moereplay.simulator.compiled.state import behind, copies, in_front, pool_of
from moereplay.simulator.jit.marks import called, fast

NO_QUEUE, BY_LAST_USE, BY_ENTRY = range(len(QUEUES))


@fast
def move_last(s, y):
    """To the end of its pool's queue."""
    leave_queue(s, y)
    node = s["n_copies"] + pool_of(s, y)
    last = in_front(s)[node]
    behind(s)[last], in_front(s)[y] = y, last
    behind(s)[y], in_front(s)[node] = node, y


@fast
def leave_queue(s, y):
    """It leaves a ring of itself."""
    before, after = in_front(s)[y], behind(s)[y]
    behind(s)[before], in_front(s)[after] = after, before
    behind(s)[y], in_front(s)[y] = y, y


@fast
def first_of_queue(s, pool):
    """The first that may leave; there must be one."""
    y = behind(s)[s["n_copies"] + pool]
    while copies(s)[y]["protected"] == 1:
        y = behind(s)[y]
    return y


@called
def clear_queues(s):
    """Every copy, and every pool's node, is a ring of itself."""
    for node in range(s["n_queued"]):
        behind(s)[node], in_front(s)[node] = node, node
