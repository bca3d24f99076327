"""Transfers from the cache's side: reserve bytes at the start, make copies resident at the end; and side buffers.

Prefetches into side buffers never evict a cached copy.
"""

from __future__ import annotations

from moereplay.policies.contract import IN_FLIGHT, NONE, RESIDENT
from moereplay.simulator.compiled.cache import bypass, enter, join_pool, leave, move_in, occupy, set_state
from moereplay.simulator.compiled.counters import BY_DEMAND, DECLINED, IS_PROMOTE, count, note
from moereplay.simulator.compiled.space import BYPASSED, GRANTED, REFUSED, make_space
from moereplay.simulator.compiled.state import layer_of, notifier
from moereplay.simulator.jit.marks import called, fast

on_insert = notifier("on_insert")


@fast
def claim(s, hooks, y):
    """Reserve the bytes of a transfer that is about to start, with evictions."""
    is_prefetch = s.owned[y]["prefetch"]
    if is_prefetch == 1 and s["side_slots"] > 0:
        return claim_side(s, y)
    claimed = make_space(s, hooks, y, is_prefetch)
    if claimed == GRANTED:
        occupy(s, y)
    elif s["has_admit"] == 1 and claimed == BYPASSED:
        bypass(s, y)
        count(s, DECLINED, layer_of(s, y), 1)
    return claimed


@fast
def land(s, hooks, y):
    """Complete a transfer: make the copy resident unless it bypasses the cache."""
    mine = s.owned[y]
    if s["has_admit"] == 1 and mine["bypasses"] == 1:
        return
    unused = 1 if mine["prefetch"] == 1 and mine["awaited"] == 0 else 0
    enter(s, y, unused)
    if s["side_slots"] > 0 and mine["side"] == 1:
        if mine["awaited"] == 1:
            promote(s, hooks, y)
        return
    join_pool(s, y)
    if s["listeners_on_insert"] != 0:
        on_insert(s, hooks, y, unused)


# side buffers: prefetches go there and never evict a cached copy


@called
def claim_side(s, y):
    """Reserve a free side buffer, or the oldest that may be overwritten."""
    if s["side_buffer"]["in_side"] >= s["side_slots"]:
        stale = overwritable(s)
        if stale == NONE:
            return REFUSED
        take(s, stale)
        leave(s, stale, y)
    s.buffered[s["side_buffer"]["in_side"]] = y
    s["side_buffer"]["in_side"] += 1
    s.owned[y]["side"] = 1
    set_state(s, y, IN_FLIGHT)
    return GRANTED


@called
def overwritable(s):
    """Return the oldest copy in a side buffer whose gate has passed and that is not pinned, or NONE."""
    for i in range(s["side_buffer"]["in_side"]):
        y = s.buffered[i]
        target, step = s.owned[y]["target"], s.now["step"]
        passed = target < step or (target == step and s.now["gated"] == 1)
        if passed and s.copies[y]["state"] == RESIDENT and s.copies[y]["protected"] == 0:
            return y
    return NONE


@called
def take(s, y):
    """Free the side buffer of copy y; the others keep their order."""
    kept = 0
    for i in range(s["side_buffer"]["in_side"]):
        held = s.buffered[i]
        s.buffered[kept] = held
        if held != y:
            kept += 1
    s["side_buffer"]["in_side"] = kept
    s.owned[y]["side"] = 0


@called
def promote(s, hooks, y):
    """Move a demanded copy from its side buffer into the cache, if there is space; no bytes cross the link."""
    if make_space(s, hooks, y, 0) != GRANTED:
        return
    take(s, y)
    move_in(s, y)
    note(s, IS_PROMOTE, y, BY_DEMAND)
    if s["listeners_on_insert"] != 0:
        on_insert(s, hooks, y, 0)


@called
def clear_side_buffers(s):
    s["side_buffer"]["in_side"] = 0
    for y in range(s["n_copies"]):
        s.owned[y]["side"] = 0
