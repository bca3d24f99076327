"""Transfers as the tier sees them: bytes are claimed when one starts, and a copy is resident when it has landed."""

from __future__ import annotations

from policies.contract import IN_FLIGHT, NONE, RESIDENT
from simulator.compiled.events import teller
from simulator.compiled.jit import called, fast
from simulator.compiled.ledger import DECLINED, INSERTIONS, count
from simulator.compiled.log import BY_DEMAND, IS_PROMOTE, note
from simulator.compiled.order import join_pool, touch
from simulator.compiled.room import GRANTED, REFUSED, STREAMED, leave, make_room
from simulator.compiled.state import copies, expert_of, experts, layer_of, now, owned, pools, side
from simulator.compiled.tier import find_any, stamp

tell_inserted = teller("on_insert")


@fast
def claim(w, hands, y):
    """Take the bytes of a transfer that is about to start, evicting what must leave."""
    mine = owned(w)[y]
    if mine["prefetch"] == 1 and w["side_slots"] > 0:
        return claim_side(w, y)
    w["speculative"] = mine["prefetch"]
    verdict = make_room(w, hands, y)
    if verdict == GRANTED:
        pools(w)[copies(w)[y]["pool"]]["used"] += copies(w)[y]["bytes"]
        copies(w)[y]["state"] = IN_FLIGHT
    elif verdict == STREAMED:
        w["staged"], mine["streamed"] = y, 1
        copies(w)[y]["state"] = IN_FLIGHT
        count(w, DECLINED, layer_of(w, y), 1)
    return verdict


@fast
def land(w, hands, y):
    """A transfer is complete: resident, unless it was streamed."""
    mine = owned(w)[y]
    if mine["streamed"] == 1:
        return
    unused = mine["prefetch"] == 1 and mine["awaited"] == 0
    enter(w, y, unused)
    if mine["side"] == 1:
        if mine["awaited"] == 1:
            promote(w, hands, y)
        return
    join_pool(w, y)
    if w["listeners_on_insert"] != 0:
        tell_inserted(w, hands, y, 1 if unused else 0)


@fast
def enter(w, y, unused):
    """It is resident from now on."""
    mine, copy, x = owned(w)[y], copies(w)[y], expert_of(w, y)
    known = experts(w)[x]["uses_here"] > 0 or (w["precisions"] > 1 and find_any(w, x, RESIDENT) != NONE)
    w["arrivals"] += 1
    copy["state"], copy["entered"], copy["prefetched"] = RESIDENT, w["arrivals"], 1 if unused else 0
    mine["counted"] = 1 if unused and not known else 0
    mine["entered_step"], mine["ever"] = now(w)["step"], 1
    count(w, INSERTIONS, layer_of(w, y), 1)
    if unused:
        stamp(w, x)
    if mine["counted"] == 1:
        experts(w)[x]["uses_here"] = 1
    touch(w, x)


# side buffers: prefetches go there and never evict a cached copy


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
def promote(w, hands, y):
    """A demanded copy moves from its side buffer into the cache, if room can be made; no bytes cross the link."""
    w["speculative"] = 0
    if make_room(w, hands, y) != GRANTED:
        return
    leave_side(w, y)
    pools(w)[copies(w)[y]["pool"]]["used"] += copies(w)[y]["bytes"]
    w["arrivals"] += 1
    copies(w)[y]["entered"] = w["arrivals"]  # the cache, now
    join_pool(w, y)
    touch(w, expert_of(w, y))
    note(w, IS_PROMOTE, y, BY_DEMAND)
    if w["listeners_on_insert"] != 0:
        tell_inserted(w, hands, y, 0)
