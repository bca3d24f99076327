"""A link: a queue with demands ahead of prefetches, and transfers that run first in, first out, without preemption.

`link` is a row of `links`: first the links into the fast tier, then one into each lower tier.
"""

from __future__ import annotations

from moereplay.policies.contract import ABSENT, QUEUED
from moereplay.simulator.compiled.cache import forget_evicted, set_state
from moereplay.simulator.compiled.clock import NEVER_DUE, first_piece, free, send
from moereplay.simulator.compiled.counters import (
    BY_CPU,
    BY_DEMAND,
    BY_PREFETCH,
    BY_STREAM,
    BYTES_DEMAND,
    BYTES_LOWER,
    BYTES_PREFETCH,
    IS_CANCEL,
    IS_DROP,
    IS_FILL,
    IS_TRANSFER,
    PREFETCH_CANCELLED,
    PREFETCH_DROPPED,
    PREFETCH_STARTED,
    PREFETCH_USED,
    count,
    note,
    span,
)
from moereplay.simulator.compiled.lower_tiers import (
    GOES_ON,
    GOES_TO_CPU,
    claim_lower,
    copy_of,
    is_for_cpu,
    is_prefetch,
    read,
    release,
)
from moereplay.simulator.compiled.space import BYPASSED, GRANTED, REFUSED
from moereplay.simulator.compiled.state import (
    home_of,
    layer_of,
)
from moereplay.simulator.compiled.transfers import claim
from moereplay.simulator.jit.marks import called, fast
from moereplay.simulator.rates import MILLION


@fast
def mask(s, at):
    """Return the ring index of a position."""
    return at & (s["n_ring"] - 1)


@fast
def place(s, link, at):
    """Return the index of a position in a link's part of the rings."""
    if s["n_links"] == 1:
        return mask(s, at)
    return link * s["n_ring"] + mask(s, at)


# the queue


@fast
def enqueue(s, y, as_prefetch):
    """Mark copy y as queued, with a new transfer."""
    mine = s.owned[y]
    set_state(s, y, QUEUED)
    mine["prefetch"], mine["awaited"], mine["bypasses"] = as_prefetch, 0, 0


@fast
def announce(s, y):
    """Mark a demand as queued that `fetch_announced` will start later."""
    set_state(s, y, QUEUED)
    s["link"]["announced"] += 1


@fast
def take_announced(s):
    s["link"]["announced"] -= 1


@fast
def any_announced(s):
    """Return whether compute has yet to hand over a demand."""
    return s["has_loading"] == 1 and s["link"]["announced"] > 0


@fast
def push(s, link, entry, as_prefetch):
    """Append an entry to a link's demand queue or prefetch queue."""
    mine = s["links"][link]
    if as_prefetch == 1:
        s.prefetch_queue[place(s, link, mine["prefetch_end"])] = entry
        mine["prefetch_end"] += 1
    else:
        s.demand_queue[place(s, link, mine["demand_end"])] = entry
        mine["demand_end"] += 1


@fast
def set_target(s, y, target):
    """Set the step that a prefetch is for."""
    s.owned[y]["target"] = target


@fast
def cancel_on(s, link, step):
    """Cancel queued prefetches for this step or an earlier one; the others keep their order."""
    kept = s["links"][link]["prefetch_first"]
    for at in range(s["links"][link]["prefetch_first"], s["links"][link]["prefetch_end"]):
        y = s.prefetch_queue[place(s, link, at)]
        if s.owned[y]["target"] <= step:
            if s["n_tiers"] > 0:
                release(s, tier_below(s, link), y)
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)
        else:
            s.prefetch_queue[place(s, link, kept)] = y
            kept += 1
    s["links"][link]["prefetch_end"] = kept


@fast
def abandon(s, y, counter, line):
    """Remove a queued prefetch and count it under `counter`."""
    set_state(s, y, ABSENT)
    count(s, counter, layer_of(s, y), 1)
    note(s, line, y, BY_PREFETCH)


# transfers


@fast
def start_on(s, hooks, link):
    """Start transfers on a link, demands first. A demand that finds no space blocks the link."""
    while may_start(s, link):
        entry = first_queued(s, link)
        claimed = claim_on(s, hooks, link, entry)
        if claimed != REFUSED:
            begin(s, link, entry, claimed)
        elif not is_prefetch(s, entry):
            return
        else:
            drop(s, link, entry)


@fast
def claim_on(s, hooks, link, entry):
    """Reserve space for the first queued entry in the tier that the link fills."""
    if s["victim_ns"] > 0:
        forget_evicted(s)
    if s["n_tiers"] > 0 and link >= first_fill(s):
        onward = GOES_TO_CPU if is_for_cpu(s, entry) else GOES_ON
        return GRANTED if claim_lower(s, link - first_fill(s), copy_of(s, entry), onward) else REFUSED
    return claim(s, hooks, entry)


@fast
def may_start(s, link):
    """Return whether a transfer is queued and the link has a free slot."""
    mine = s["links"][link]
    queued = mine["demand_first"] < mine["demand_end"] or mine["prefetch_first"] < mine["prefetch_end"]
    return queued and mine["flight_end"] - mine["flight_first"] < mine["depth"]


@fast
def demand_may_start(s, link):
    """Return whether a demand is queued and the link has a free slot."""
    return demand_waits(s, link) and may_start(s, link)


@fast
def first_queued(s, link):
    """Return the entry whose transfer starts next."""
    if demand_waits(s, link):
        return s.demand_queue[place(s, link, s["links"][link]["demand_first"])]
    return s.prefetch_queue[place(s, link, s["links"][link]["prefetch_first"])]


@fast
def drop(s, link, y):
    """Drop the first queued prefetch, because it finds no space."""
    s["links"][link]["prefetch_first"] += 1
    if s["n_tiers"] > 0:
        release(s, tier_below(s, link), y)
    abandon(s, y, PREFETCH_DROPPED, IS_DROP)


@fast
def begin(s, link, entry, claimed):
    """Issue the first queued transfer."""
    ends = send(s, link, copy_of(s, entry))
    issue(s, link, entry, claimed, ends)
    note_start(s, link, entry, ends)


@fast
def issue(s, link, entry, claimed, ends):
    """Move the first queued entry to those in flight."""
    mine, y = s["links"][link], copy_of(s, entry)
    if s["has_admit"] == 1 and not is_for_cpu(s, entry):
        s.owned[y]["bypasses"] = 1 if claimed == BYPASSED else 0
    at = place(s, link, mine["flight_end"])
    never = s["link"]["closed"] == 1 or s["external"] == 1
    s.flight[at], s.lands[at] = entry, NEVER_DUE if never else ends
    if s["has_pieces"] == 1:
        s.piece_at[at] = NEVER_DUE if s["link"]["closed"] == 1 else first_piece(s, link, y)
    mine["flight_end"] += 1
    if is_prefetch(s, entry):
        mine["prefetch_first"] += 1
    else:
        mine["demand_first"] += 1
    if s["n_tiers"] > 0:
        read(s, tier_below(s, link), y)


@fast
def start_again(s, y):
    """Start a transfer that another platform's run has started, without a queue."""
    mine, ends = s["links"][0], send(s, 0, y)
    s.lands[place(s, 0, mine["flight_end"])] = NEVER_DUE if s["link"]["closed"] == 1 else ends
    mine["flight_end"] += 1


@fast
def set_landing(s, link, at, time):
    """Set the time of the next event of a transfer in flight, ns; `at`: its position in the ring."""
    s.lands[place(s, link, at)] = time


@fast
def note_start(s, link, entry, ends):
    """Count and log a transfer that starts."""
    y, kind = copy_of(s, entry), IS_TRANSFER
    layer, size = layer_of(s, y), s.copies[y]["bytes"]
    if s["n_tiers"] > 0 and link >= first_fill(s):
        count(s, BYTES_LOWER, layer, size)
        kind = IS_FILL
    elif is_prefetch(s, entry):
        count(s, PREFETCH_STARTED, layer, 1)
        count(s, BYTES_PREFETCH, layer, size)
    else:
        count(s, BYTES_DEMAND, layer, size)
    span(s, kind, y, 0, ends - s["clock"]["time"], cause(s, entry))


@fast
def cause(s, entry):
    """Return the cause of a transfer for the event log."""
    if is_for_cpu(s, entry):
        return BY_CPU
    if s.owned[entry]["prefetch"] == 1:
        return BY_PREFETCH
    return BY_STREAM if s.owned[entry]["bypasses"] == 1 else BY_DEMAND


@fast
def landing(s, link):
    """Return when a link's next transfer completes, or its first piece arrives, ns."""
    if s["links"][link]["flight_first"] == s["links"][link]["flight_end"]:
        return NEVER_DUE
    at = place(s, link, s["links"][link]["flight_first"])
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        return s.piece_at[at]
    return s.lands[at]


@fast
def awaits_piece(s, link):
    """Return whether the next event of a link is the arrival of a first piece."""
    return s["links"][link]["first"] < MILLION and s["links"][link]["pieced"] == 0


@fast
def take_piece(s, link):
    """Record the arrival of the first piece of a link's oldest transfer; return its copy."""
    s["links"][link]["pieced"] = 1
    return s.flight[place(s, link, s["links"][link]["flight_first"])]


@fast
def lands_at(s, y):
    """Return when copy y completes, ns; compute runs on its first piece."""
    link = home_of(s, y)
    return s.lands[place(s, link, s["links"][link]["flight_first"])]


@fast
def first_piece_arrived(s, y):
    """Return whether copy y is in flight, next to complete on its link, and its first piece has arrived."""
    mine = s["links"][home_of(s, y)]
    return mine["pieced"] == 1 and s.flight[place(s, home_of(s, y), mine["flight_first"])] == y


@fast
def take_landed(s, link):
    """Remove a link's oldest transfer, which is complete; return its entry."""
    y = s.flight[place(s, link, s["links"][link]["flight_first"])]
    s["links"][link]["flight_first"] += 1
    if s["has_pieces"] == 1:
        s["links"][link]["pieced"] = 0
    return y


@fast
def notify_arrival(s, y):
    """Add copy y to the arrivals that compute waits for."""
    s.ready[mask(s, s["link"]["ready_end"])] = y
    s["link"]["ready_end"] += 1


@fast
def first_fill(s):
    """Return the first link that fills a lower tier."""
    return s["n_links"] - s["n_tiers"]


@fast
def tier_below(s, link):
    """Return the tier that a link reads: a row of `lower`, or the number of rows for the slow tier."""
    return max(0, link - first_fill(s) + 1)


# queries


@fast
def is_busy(s, link):
    """Return whether a transfer is in flight or a demand is queued."""
    return s["links"][link]["flight_first"] < s["links"][link]["flight_end"] or demand_waits(s, link)


@fast
def is_moving(s, link):
    """Return whether a transfer is in flight."""
    return s["links"][link]["flight_first"] < s["links"][link]["flight_end"]


@fast
def demand_waits(s, link):
    return s["links"][link]["demand_first"] < s["links"][link]["demand_end"]


@fast
def prefetch_waits(s, link):
    return s["links"][link]["prefetch_first"] < s["links"][link]["prefetch_end"]


@fast
def await_transfer(s, y):
    """Make a demand wait for the transfer of copy y."""
    mine = s.owned[y]
    if mine["prefetch"] == 1 and mine["awaited"] == 0:
        mine["awaited"] = 1
        count(s, PREFETCH_USED, layer_of(s, y), 1)
        if s["has_pieces"] == 1 and first_piece_arrived(s, y):
            notify_arrival(s, y)


# start and end


@called
def clear_link(s, link):
    """Empty a link's queues and abandon its transfers."""
    mine = s["links"][link]
    mine["demand_first"], mine["prefetch_first"] = mine["demand_end"], mine["prefetch_end"]
    mine["flight_first"], mine["pieced"] = mine["flight_end"], 0
    free(s, link)


@fast
def close_links(s):
    """End the run: transfers that are issued from here on never land."""
    s["link"]["closed"] = 1


@called
def forget_bypasses(s):
    for y in range(s["n_copies"]):
        s.owned[y]["bypasses"] = 0
