"""A link: a queue, demand ahead of prefetch; transfers go first in first out and are never interrupted.

`link` is a row of `links`: those into the fast tier, then one into each lower tier.
"""

from __future__ import annotations

from moereplay.policies.contract import ABSENT, QUEUED
from moereplay.simulator.compiled.cache import set_state
from moereplay.simulator.compiled.channel import MILLION, first_piece, free, send
from moereplay.simulator.compiled.clock import NEVER_DUE
from moereplay.simulator.compiled.counters import (
    BYTES_DEMAND,
    BYTES_LOWER,
    BYTES_PREFETCH,
    PREFETCH_CANCELLED,
    PREFETCH_DROPPED,
    PREFETCH_STARTED,
    PREFETCH_USED,
    count,
)
from moereplay.simulator.compiled.log import (
    BY_DEMAND,
    BY_PREFETCH,
    BY_STREAM,
    IS_CANCEL,
    IS_DROP,
    IS_FILL,
    IS_TRANSFER,
    note,
    span,
)
from moereplay.simulator.compiled.lower_tiers import (
    claim_lower,
    read,
    release,
)
from moereplay.simulator.compiled.space import BYPASSED, GRANTED, REFUSED
from moereplay.simulator.compiled.state import (
    asks,
    copies,
    demands,
    flight,
    home_of,
    lands,
    layer_of,
    owned,
    piece_at,
    ready,
)
from moereplay.simulator.compiled.transfers import claim
from moereplay.simulator.jit.marks import called, fast


@fast
def mask(s, at):
    """A ring's index of a position."""
    return at & (s["n_ring"] - 1)


@fast
def place(s, link, at):
    """The index of a position in the rings of a link, which lie one after the other."""
    if s["n_links"] == 1:
        return mask(s, at)
    return link * s["n_ring"] + mask(s, at)


# the queue


@fast
def enqueue(s, y, is_prefetch):
    """A new transfer of y waits for its link."""
    mine = owned(s)[y]
    set_state(s, y, QUEUED)
    mine["prefetch"], mine["awaited"], mine["bypasses"] = is_prefetch, 0, 0


@fast
def announce(s, y):
    """A demand that will be fetched: it counts as queued, but does not start before `fetch_announced`."""
    set_state(s, y, QUEUED)
    s["link"]["announced"] += 1


@fast
def take_announced(s):
    """One that was announced is queued now."""
    s["link"]["announced"] -= 1


@fast
def any_announced(s):
    """Whether compute has yet to hand over a demand."""
    return s["has_loading"] == 1 and s["link"]["announced"] > 0


@fast
def push(s, link, y, is_prefetch):
    """The last of a link's queue of its kind."""
    mine = s["links"][link]
    if is_prefetch == 1:
        asks(s)[place(s, link, mine["ask_end"])] = y
        mine["ask_end"] += 1
    else:
        demands(s)[place(s, link, mine["demand_end"])] = y
        mine["demand_end"] += 1


@fast
def aim(s, y, target):
    """The step that a prefetch is for."""
    owned(s)[y]["target"] = target


@fast
def cancel_on(s, link, step):
    """Drop every queued prefetch aimed at this step or an earlier one; the others keep their order."""
    kept = s["links"][link]["ask_first"]
    for at in range(s["links"][link]["ask_first"], s["links"][link]["ask_end"]):
        y = asks(s)[place(s, link, at)]
        if owned(s)[y]["target"] <= step:
            if s["n_tiers"] > 0:
                release(s, tier_below(s, link), y)
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)
        else:
            asks(s)[place(s, link, kept)] = y
            kept += 1
    s["links"][link]["ask_end"] = kept


@fast
def abandon(s, y, counter, line):
    """A queued prefetch will not be fetched after all."""
    set_state(s, y, ABSENT)
    count(s, counter, layer_of(s, y), 1)
    note(s, line, y, BY_PREFETCH)


# transfers


@fast
def start_on(s, hooks, link):
    """Start what can start on one link: demands first, and one that finds no room holds this link."""
    while may_start(s, link):
        y = first_queued(s, link)
        claimed = claim_on(s, hooks, link, y)
        if claimed != REFUSED:
            begin(s, link, y, claimed)
        elif owned(s)[y]["prefetch"] == 0:
            return
        else:
            drop(s, link, y)


@fast
def claim_on(s, hooks, link, y):
    """Take the bytes of a copy in the tier that a link fills."""
    if s["n_tiers"] > 0 and link >= first_fill(s):
        return GRANTED if claim_lower(s, link - first_fill(s), y) else REFUSED
    return claim(s, hooks, y)


@fast
def may_start(s, link):
    """Whether something is queued and the link has room for it."""
    mine = s["links"][link]
    queued = mine["demand_first"] < mine["demand_end"] or mine["ask_first"] < mine["ask_end"]
    return queued and mine["flight_end"] - mine["flight_first"] < mine["depth"]


@fast
def demand_may_start(s, link):
    """Whether a demand is queued and the link has room for it."""
    return demand_waits(s, link) and may_start(s, link)


@fast
def first_queued(s, link):
    """Who starts next."""
    if demand_waits(s, link):
        return demands(s)[place(s, link, s["links"][link]["demand_first"])]
    return asks(s)[place(s, link, s["links"][link]["ask_first"])]


@fast
def drop(s, link, y):
    """The first queued prefetch finds no room, and does not wait for any."""
    s["links"][link]["ask_first"] += 1
    if s["n_tiers"] > 0:
        release(s, tier_below(s, link), y)
    abandon(s, y, PREFETCH_DROPPED, IS_DROP)


@fast
def begin(s, link, y, claimed):
    """The first queued is issued."""
    mine, ends = s["links"][link], send(s, link, y)
    if s["has_admit"] == 1:
        owned(s)[y]["bypasses"] = 1 if claimed == BYPASSED else 0
    at = place(s, link, mine["flight_end"])
    never = s["link"]["closed"] == 1 or s["external"] == 1
    flight(s)[at], lands(s)[at] = y, NEVER_DUE if never else ends
    if s["has_pieces"] == 1:
        piece_at(s)[at] = NEVER_DUE if s["link"]["closed"] == 1 else first_piece(s, link, y)
    mine["flight_end"] += 1
    if owned(s)[y]["prefetch"] == 1:
        mine["ask_first"] += 1
    else:
        mine["demand_first"] += 1
    if s["n_tiers"] > 0:
        read(s, tier_below(s, link), y)
    note_start(s, link, y, ends)


@fast
def note_start(s, link, y, ends):
    """Count a transfer that starts, and log it."""
    layer, size, kind = layer_of(s, y), copies(s)[y]["bytes"], IS_TRANSFER
    if s["n_tiers"] > 0 and link >= first_fill(s):
        count(s, BYTES_LOWER, layer, size)
        kind = IS_FILL
    elif owned(s)[y]["prefetch"] == 1:
        count(s, PREFETCH_STARTED, layer, 1)
        count(s, BYTES_PREFETCH, layer, size)
    else:
        count(s, BYTES_DEMAND, layer, size)
    span(s, kind, y, 0, ends - s["clock"]["time"], cause(s, y))


@fast
def cause(s, y):
    """Of a transfer, for the event log."""
    if owned(s)[y]["prefetch"] == 1:
        return BY_PREFETCH
    return BY_STREAM if owned(s)[y]["bypasses"] == 1 else BY_DEMAND


@fast
def landing(s, link):
    """When the next transfer of a link is complete, or its first piece if that has not arrived."""
    if s["links"][link]["flight_first"] == s["links"][link]["flight_end"]:
        return NEVER_DUE
    at = place(s, link, s["links"][link]["flight_first"])
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        return piece_at(s)[at]
    return lands(s)[at]


@fast
def awaits_piece(s, link):
    """Whether the next event of a link is a first piece."""
    return s["links"][link]["first"] < MILLION and s["links"][link]["pieced"] == 0


@fast
def take_piece(s, link):
    """The first piece of the oldest transfer of a link is here."""
    s["links"][link]["pieced"] = 1
    return flight(s)[place(s, link, s["links"][link]["flight_first"])]


@fast
def lands_at(s, y):
    """When y is complete, of which compute has the first piece, ns."""
    link = home_of(s, y)
    return lands(s)[place(s, link, s["links"][link]["flight_first"])]


@fast
def its_piece_is_here(s, y):
    """Whether y, which is in flight, is the next to land on its link, and its first piece has arrived."""
    mine = s["links"][home_of(s, y)]
    return mine["pieced"] == 1 and flight(s)[place(s, home_of(s, y), mine["flight_first"])] == y


@fast
def take_landed(s, link):
    """The oldest transfer of a link, which is complete."""
    y = flight(s)[place(s, link, s["links"][link]["flight_first"])]
    s["links"][link]["flight_first"] += 1
    if s["has_pieces"] == 1:
        s["links"][link]["pieced"] = 0
    return y


@fast
def call_up(s, y):
    """A copy that compute waits for is there."""
    ready(s)[mask(s, s["link"]["ready_end"])] = y
    s["link"]["ready_end"] += 1


@fast
def first_fill(s):
    """The first link that fills a lower tier."""
    return s["n_links"] - s["n_tiers"]


@fast
def tier_below(s, link):
    """The tier that a link reads: a row of `lower`, or one after them for the slow tier."""
    return max(0, link - first_fill(s) + 1)


# what others ask


@fast
def is_busy(s, link):
    """Whether something is in flight, or a demand is queued."""
    return s["links"][link]["flight_first"] < s["links"][link]["flight_end"] or demand_waits(s, link)


@fast
def is_moving(s, link):
    """Whether something is in flight."""
    return s["links"][link]["flight_first"] < s["links"][link]["flight_end"]


@fast
def demand_waits(s, link):
    """Whether a demand waits to start."""
    return s["links"][link]["demand_first"] < s["links"][link]["demand_end"]


@fast
def prefetch_waits(s, link):
    """Whether a prefetch waits to start."""
    return s["links"][link]["ask_first"] < s["links"][link]["ask_end"]


@fast
def meet(s, y):
    """A demand waits for this transfer."""
    mine = owned(s)[y]
    if mine["prefetch"] == 1 and mine["awaited"] == 0:
        mine["awaited"] = 1
        count(s, PREFETCH_USED, layer_of(s, y), 1)
        if s["has_pieces"] == 1 and its_piece_is_here(s, y):
            call_up(s, y)


# start and end


@called
def clear_link(s, link):
    """Nothing is queued, and what is in flight is abandoned."""
    mine = s["links"][link]
    mine["demand_first"], mine["ask_first"] = mine["demand_end"], mine["ask_end"]
    mine["flight_first"], mine["pieced"] = mine["flight_end"], 0
    free(s, link)


@fast
def close_links(s):
    """The run is over: what is issued from here on does not land any more."""
    s["link"]["closed"] = 1


@called
def forget_bypasses(s):
    """No transfer is on its way to the bypass buffer."""
    for y in range(s["n_copies"]):
        owned(s)[y]["bypasses"] = 0
