"""Transfers as the tier sees them: bytes are claimed when one starts, and a copy is resident when it has landed."""

from __future__ import annotations

from policies.contract import IN_FLIGHT, NONE, RESIDENT
from simulator.compiled.cache import GRANTED, STREAMED, find_any, make_room, stamp
from simulator.compiled.counters import DECLINED, INSERTIONS, count
from simulator.compiled.runtime import listeners
from simulator.compiled.runtime.jit import fast
from simulator.compiled.runtime.ranking import join_pool, touch
from simulator.compiled.runtime.state import copies, expert_of, experts, layer_of, now, owned, pools
from simulator.compiled.side_buffer import claim_side, promote


@fast
def claim(w, hooks, y):
    """Take the bytes of a transfer that is about to start, evicting what must leave."""
    mine = owned(w)[y]
    if mine["prefetch"] == 1 and w["side_slots"] > 0:
        return claim_side(w, y)
    w["speculative"] = mine["prefetch"]
    verdict = make_room(w, hooks, y)
    if verdict == GRANTED:
        pools(w)[copies(w)[y]["pool"]]["used"] += copies(w)[y]["bytes"]
        copies(w)[y]["state"] = IN_FLIGHT
    elif verdict == STREAMED:
        w["staged"], mine["streamed"] = y, 1
        copies(w)[y]["state"] = IN_FLIGHT
        count(w, DECLINED, layer_of(w, y), 1)
    return verdict


@fast
def land(w, hooks, y):
    """A transfer is complete: resident, unless it was streamed."""
    mine = owned(w)[y]
    if mine["streamed"] == 1:
        return
    unused = mine["prefetch"] == 1 and mine["awaited"] == 0
    enter(w, y, unused)
    if mine["side"] == 1:
        if mine["awaited"] == 1:
            promote(w, hooks, y)
        return
    join_pool(w, y)
    if w["hears_insert"] != 0:
        listeners.inserted(w, hooks, y, 1 if unused else 0)


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
