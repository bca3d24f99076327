"""Side buffers: prefetches go there and never evict a cached copy."""

from __future__ import annotations

from moereplay.policies.contract import IN_FLIGHT, NONE, RESIDENT
from moereplay.simulator.compiled import listeners
from moereplay.simulator.compiled.cache import leave, move_in, set_state
from moereplay.simulator.compiled.log import BY_DEMAND, IS_PROMOTE, note
from moereplay.simulator.compiled.space import GRANTED, REFUSED, make_space
from moereplay.simulator.compiled.state import buffered, copies, now, owned
from moereplay.simulator.jit.marks import called

on_insert = listeners.notifier("on_insert")


@called
def claim_side(s, y):
    """A free buffer, or the oldest that can be overwritten."""
    if s["side_buffer"]["in_side"] >= s["side_slots"]:
        stale = overwritable(s)
        if stale == NONE:
            return REFUSED
        take(s, stale)
        leave(s, stale, y)
    buffered(s)[s["side_buffer"]["in_side"]] = y
    s["side_buffer"]["in_side"] += 1
    owned(s)[y]["side"] = 1
    set_state(s, y, IN_FLIGHT)
    return GRANTED


@called
def overwritable(s):
    """The oldest copy whose gate has passed and that is not in use, or NONE."""
    for i in range(s["side_buffer"]["in_side"]):
        y = buffered(s)[i]
        target, step = owned(s)[y]["target"], now(s)["step"]
        passed = target < step or (target == step and now(s)["gated"] == 1)
        if passed and copies(s)[y]["state"] == RESIDENT and copies(s)[y]["protected"] == 0:
            return y
    return NONE


@called
def take(s, y):
    """Its buffer is free again; the others keep their order."""
    kept = 0
    for i in range(s["side_buffer"]["in_side"]):
        held = buffered(s)[i]
        buffered(s)[kept] = held
        if held != y:
            kept += 1
    s["side_buffer"]["in_side"] = kept
    owned(s)[y]["side"] = 0


@called
def promote(s, hooks, y):
    """A demanded copy moves from its side buffer into the cache, if space can be made; no bytes cross the link."""
    if make_space(s, hooks, y, 0) != GRANTED:
        return
    take(s, y)
    move_in(s, y)
    note(s, IS_PROMOTE, y, BY_DEMAND)
    if s["listeners_on_insert"] != 0:
        on_insert(s, hooks, y, 0)


@called
def clear_side_buffers(s):
    """Every buffer is free."""
    s["side_buffer"]["in_side"] = 0
    for y in range(s["n_copies"]):
        owned(s)[y]["side"] = 0
