"""The link of a plain world: transfers start, land, and push copies out."""

from __future__ import annotations

from policies.contract import ABSENT, IN_FLIGHT, RESIDENT
from simulator.compiled import ledger
from simulator.compiled.jit import bit_length, called, fast
from simulator.compiled.ledger import BUCKETS, count
from simulator.compiled.link import abandon, mask, next_landing
from simulator.compiled.log import IS_DROP
from simulator.compiled.order import join_pool, leave_pool, smallest
from simulator.compiled.plain.queue import BY_ENTRY, NO_QUEUE, first_of_queue, leave_queue, move_last
from simulator.compiled.room import forget_done, smallest_spare, spare_bytes_suffice
from simulator.compiled.state import (
    asks,
    copies,
    demands,
    experts,
    flight,
    lands,
    layer_of,
    lifetimes,
    now,
    owned,
    pools,
    ready,
    wire_ns,
)
from simulator.compiled.tier import stamp

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
    while w["flight_end"] - w["flight_first"] < w["depth"]:
        is_demand = w["demand_first"] < w["demand_end"]
        if is_demand:
            y = demands(w)[mask(w, w["demand_first"])]
        elif w["ask_first"] < w["ask_end"]:
            y = asks(w)[mask(w, w["ask_first"])]
            w["ask_first"] += 1
        else:
            return
        layer = layer_of(w, y)
        if claim(w, hooks, y, layer, not is_demand):
            begin(w, y, layer, is_demand)
        elif is_demand:
            return
        else:
            abandon(w, y, ledger.PREFETCH_DROPPED, IS_DROP)


@fast
def begin(w, y, layer, is_demand):
    """It has room, and is issued."""
    size, spent = copies(w)[y]["bytes"], issue(w, y, layer)
    count(w, ledger.LINK_BUSY_NS, layer, spent)
    if is_demand:
        w["demand_first"] += 1
        count(w, ledger.BYTES_DEMAND, layer, size)
    else:
        count(w, ledger.PREFETCH_STARTED, layer, 1)
        count(w, ledger.BYTES_PREFETCH, layer, size)


@fast
def issue(w, y, layer):
    """Latency runs at once, bytes follow those of the transfers before; returns for how long the link is busier."""
    begins = max(w["time"], w["last_done"])
    w["last_done"] = max(w["time"] + w["latency_ns"], w["last_done"]) + wire_ns(w)[layer]
    at = mask(w, w["flight_end"])
    flight(w)[at], lands(w)[at] = y, w["last_done"]
    w["flight_end"] += 1
    return w["last_done"] - begins


# room


@fast
def claim(w, hooks, y, layer, speculative):
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
            evict(w, victim(w, hooks, copy["pool"]), layer)
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
    """Out of its pool: charged to the incoming layer, waste to the victim's."""
    copy, mine, layer = copies(w)[y], owned(w)[y], layer_of(w, y)
    pools(w)[copy["pool"]]["used"] -= copy["bytes"]
    leave_order(w, y)
    if mine["done"] == 1:
        forget_done(w, y)
    count(w, ledger.EVICTIONS, incoming, 1)
    age = min(bit_length(now(w)["step"] - mine["entered_step"]), BUCKETS - 1)
    lifetimes(w)[(layer * 2 + now(w)["phase"]) * BUCKETS + age] += 1
    if copy["prefetched"] == 1:
        count(w, ledger.BYTES_WASTED, layer, copy["bytes"])
    copy["state"], copy["protected"], copy["prefetched"] = ABSENT, 0, 0
    experts(w)[y]["uses_here"] = 0
    mine["evicted_pass"] = now(w)["pass"]


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
        ready(w)[mask(w, w["ready_end"])] = y
        w["ready_end"] += 1


@fast
def enter(w, y, unused):
    """Resident from now on."""
    mine, copy, expert = owned(w)[y], copies(w)[y], experts(w)[y]
    w["arrivals"] += 1
    copy["state"], copy["entered"], copy["prefetched"] = RESIDENT, w["arrivals"], 1 if unused else 0
    mine["counted"] = 1 if unused and expert["uses_here"] == 0 else 0
    mine["entered_step"], mine["ever"] = now(w)["step"], 1
    count(w, ledger.INSERTIONS, layer_of(w, y), 1)
    if unused:
        stamp(w, y)
        expert["uses_here"] = max(1, expert["uses_here"])
