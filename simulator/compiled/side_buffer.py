"""Side buffers: prefetches go there and never evict a cached copy."""

from __future__ import annotations

from policies.contract import IN_FLIGHT, NONE, RESIDENT
from simulator.compiled.cache import GRANTED, REFUSED, leave, make_room
from simulator.compiled.log import BY_DEMAND, IS_PROMOTE, note
from simulator.compiled.runtime import listeners
from simulator.compiled.runtime.jit import called
from simulator.compiled.runtime.ranking import join_pool, touch
from simulator.compiled.runtime.state import copies, expert_of, now, owned, pools, side


@called
def claim_side(w, y):
    """A free buffer, or the oldest that can be overwritten."""
    if w["in_side"] >= w["side_slots"]:
        stale = overwritable(w)
        if stale == NONE:
            return REFUSED
        leave_side(w, stale)
        leave(w, stale, y)
    side(w)[w["in_side"]] = y
    w["in_side"] += 1
    owned(w)[y]["side"] = 1
    copies(w)[y]["state"] = IN_FLIGHT
    return GRANTED


@called
def overwritable(w):
    """The oldest copy whose gate has passed and that nobody uses, or NONE."""
    for i in range(w["in_side"]):
        y = side(w)[i]
        target, step = owned(w)[y]["target"], now(w)["step"]
        passed = target < step or (target == step and now(w)["gated"] == 1)
        if passed and copies(w)[y]["state"] == RESIDENT and copies(w)[y]["protected"] == 0:
            return y
    return NONE


@called
def leave_side(w, y):
    """Its buffer is free again; the others keep their order."""
    kept = 0
    for i in range(w["in_side"]):
        held = side(w)[i]
        side(w)[kept] = held
        if held != y:
            kept += 1
    w["in_side"] = kept
    owned(w)[y]["side"] = 0


@called
def promote(w, hooks, y):
    """A demanded copy moves from its side buffer into the cache, if room can be made; no bytes cross the link."""
    w["speculative"] = 0
    if make_room(w, hooks, y) != GRANTED:
        return
    leave_side(w, y)
    pools(w)[copies(w)[y]["pool"]]["used"] += copies(w)[y]["bytes"]
    w["arrivals"] += 1
    copies(w)[y]["entered"] = w["arrivals"]  # the cache, now
    join_pool(w, y)
    touch(w, expert_of(w, y))
    note(w, IS_PROMOTE, y, BY_DEMAND)
    if w["hears_insert"] != 0:
        listeners.inserted(w, hooks, y, 0)
