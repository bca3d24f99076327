"""The link of a plain world: transfers start, land, and push copies out."""

from __future__ import annotations

from policies.contract import IN_FLIGHT
from simulator.compiled.cache import forget_done, leave
from simulator.compiled.link import begin, call_up, drop, first_queued, mask, may_start, next_landing
from simulator.compiled.plain.queue import BY_ENTRY, NO_QUEUE, first_of_queue, leave_queue, move_last
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.ranking import join_pool, leave_pool, smallest
from simulator.compiled.runtime.state import copies, flight, owned, pools
from simulator.compiled.transfers import enter
from simulator.compiled.victims import smallest_spare, spare_bytes_suffice

# the clock


@fast
def run_link(w, hooks, until):
    """Time moves on to `until`; what lands by then lands first."""
    if next_landing(w) <= until:
        catch_up(w, hooks, until)
    w["time"] = until


@called
def catch_up(w, hooks, until):
    """One landing after the other, each with what it lets start."""
    while next_landing(w) <= until:
        w["time"] = next_landing(w)
        land(w)
        start(w, hooks)


@called
def start_more(w, hooks):
    """`start`, after anything but a landing."""
    start(w, hooks)


@fast
def start(w, hooks):
    """Transfers that can start now do: demands first; one that finds no room holds the link."""
    while may_start(w):
        y = first_queued(w)
        if claim(w, hooks, y, owned(w)[y]["prefetch"] == 1):
            begin(w, y)
        elif owned(w)[y]["prefetch"] == 0:
            return
        else:
            drop(w, y)


# room


@fast
def claim(w, hooks, y, speculative):
    """Whether y has room, if need be because others leave. `speculative`: nobody waits for it."""
    copy = copies(w)[y]
    size, room = copy["bytes"], pools(w)[copy["pool"]]
    short = room["used"] + size - room["capacity"]
    if short > 0:
        if speculative and (w["free_only"] == 1 or short > room["open"]):
            return False
        if short > room["open"] and not spare_bytes_suffice(w, copy["pool"], short - room["open"]):
            return False
        while room["used"] + size > room["capacity"]:
            evict(w, victim(w, hooks, copy["pool"]), y)
    room["used"] += size
    copy["state"] = IN_FLIGHT
    return True


@fast
def victim(w, hooks, pool):
    """A candidate, or else one that this step has done with."""
    if pools(w)[pool]["open"] <= 0:
        return smallest_spare(w, hooks.keys, pool)
    if w["queue"] != NO_QUEUE:
        return first_of_queue(w, pool)
    return smallest(w, hooks.keys, pool)


@fast
def evict(w, y, incoming):
    """Out of its pool."""
    pools(w)[copies(w)[y]["pool"]]["used"] -= copies(w)[y]["bytes"]
    leave_order(w, y)
    if owned(w)[y]["done"] == 1:
        forget_done(w, y)
    leave(w, y, incoming)


@fast
def leave_order(w, y):
    """It is no candidate any more."""
    if w["queue"] == NO_QUEUE:
        leave_pool(w, y)
        return
    copy = copies(w)[y]
    owned(w)[y]["member"] = 0
    pools(w)[copy["pool"]]["open"] -= copy["bytes"] * (1 - copy["protected"])
    leave_queue(w, y)


# landing


@fast
def join_order(w, y, unused):
    """It is a candidate, now or once this step is over."""
    if w["queue"] == NO_QUEUE:
        join_pool(w, y)
        return
    copy = copies(w)[y]
    owned(w)[y]["member"] = 1
    pools(w)[copy["pool"]]["open"] += copy["bytes"] * (1 - copy["protected"])
    if unused or w["queue"] == BY_ENTRY:
        move_last(w, y)


@fast
def land(w):
    """The oldest transfer is complete: resident, and ready if compute waits for it."""
    y = flight(w)[mask(w, w["flight_first"])]
    w["flight_first"] += 1
    mine = owned(w)[y]
    unused = mine["prefetch"] == 1 and mine["awaited"] == 0
    enter(w, y, unused)
    join_order(w, y, unused)
    if not unused:
        call_up(w, y)
