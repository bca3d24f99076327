"""Who leaves first where that is the oldest stamp: queues in place of keys.

Each pool has a ring of its copies through a node of its own, which stands behind the last and before the first; a copy
in no queue is a ring of itself. By last use, a copy is queued at the gate that stamps it, so before it has arrived:
it is protected until then.
"""

from __future__ import annotations

from policies.contract import QUEUES
from simulator.compiled.runtime.jit import fast
from simulator.compiled.runtime.state import behind, copies, in_front

NO_QUEUE, BY_LAST_USE, BY_ENTRY = range(len(QUEUES))


@fast
def move_last(w, y):
    """To the end of its pool's queue."""
    leave_queue(w, y)
    node = w["n_copies"] + copies(w)[y]["pool"]
    last = in_front(w)[node]
    behind(w)[last], in_front(w)[y] = y, last
    behind(w)[y], in_front(w)[node] = node, y


@fast
def leave_queue(w, y):
    """It leaves a ring of itself."""
    before, after = in_front(w)[y], behind(w)[y]
    behind(w)[before], in_front(w)[after] = after, before
    behind(w)[y], in_front(w)[y] = y, y


@fast
def first_of_queue(w, pool):
    """The first that may leave; there must be one."""
    y = behind(w)[w["n_copies"] + pool]
    while copies(w)[y]["protected"] == 1:
        y = behind(w)[y]
    return y
