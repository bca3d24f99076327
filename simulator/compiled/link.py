"""The links: a queue each, demand ahead of prefetch; transfers go first in first out and are never interrupted.

`link` is a row of `links`. Where several act at the same time the lower one is first.
"""

from __future__ import annotations

from policies.contract import ABSENT, QUEUED
from simulator.compiled.cache import set_state
from simulator.compiled.channel import MILLION, first_piece, free, send
from simulator.compiled.clock import NEVER_DUE, resume
from simulator.compiled.counters import (
    BYTES_DEMAND,
    BYTES_PREFETCH,
    PREFETCH_CANCELLED,
    PREFETCH_DROPPED,
    PREFETCH_ISSUED,
    PREFETCH_STARTED,
    PREFETCH_USED,
    count,
)
from simulator.compiled.log import BY_DEMAND, BY_PREFETCH, BY_STREAM, IS_CANCEL, IS_DROP, IS_TRANSFER, note, span
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.state import (
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
from simulator.compiled.space import BYPASSED, REFUSED
from simulator.compiled.transfers import claim, land


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


@called
def fetch(s, y):
    """Queue a demand, behind other demands and ahead of all prefetches."""
    enqueue(s, y, 0)
    link = home_of(s, y)
    demands(s)[place(s, link, s["links"][link]["demand_end"])] = y
    s["links"][link]["demand_end"] += 1


@fast
def announce(s, y):
    """A demand that will be fetched: it counts as queued, but does not start before `fetch_announced`."""
    set_state(s, y, QUEUED)
    s["link"]["announced"] += 1


@fast
def fetch_announced(s, y):
    """Queue a demand that was announced."""
    s["link"]["announced"] -= 1
    fetch(s, y)


@fast
def any_announced(s):
    """Whether compute has yet to hand over a demand."""
    return s["link"]["announced"] > 0


@called
def prefetch(s, y, target):
    """Queue a prefetch, behind older ones."""
    enqueue(s, y, 1)
    owned(s)[y]["target"] = target
    link = home_of(s, y)
    asks(s)[place(s, link, s["links"][link]["ask_end"])] = y
    s["links"][link]["ask_end"] += 1
    count(s, PREFETCH_ISSUED, layer_of(s, y), 1)


@fast
def enqueue(s, y, is_prefetch):
    """A new transfer of y waits for its link."""
    mine = owned(s)[y]
    set_state(s, y, QUEUED)
    mine["prefetch"], mine["awaited"], mine["bypasses"] = is_prefetch, 0, 0


@called
def cancel(s, step):
    """Drop every queued prefetch aimed at this step or an earlier one; the others keep their order."""
    for link in range(s["n_links"]):
        kept = s["links"][link]["ask_first"]
        for at in range(s["links"][link]["ask_first"], s["links"][link]["ask_end"]):
            y = asks(s)[place(s, link, at)]
            if owned(s)[y]["target"] <= step:
                abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)
            else:
                asks(s)[place(s, link, kept)] = y
                kept += 1
        s["links"][link]["ask_end"] = kept


@called
def abandon(s, y, counter, line):
    """A queued prefetch will not be fetched after all."""
    set_state(s, y, ABSENT)
    count(s, counter, layer_of(s, y), 1)
    note(s, line, y, BY_PREFETCH)


# transfers


@fast
def start_transfers(s, hooks):
    """Start whatever can start now."""
    for link in range(s["n_links"]):
        start_on(s, hooks, link)


@fast
def start_on(s, hooks, link):
    """Start what can start on one link: demands first, and one that finds no room holds this link."""
    while may_start(s, link):
        y = first_queued(s, link)
        claimed = claim(s, hooks, y)
        if claimed != REFUSED:
            begin(s, link, y, claimed)
        elif owned(s)[y]["prefetch"] == 0:
            return
        else:
            drop(s, link, y)


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
    abandon(s, y, PREFETCH_DROPPED, IS_DROP)


@fast
def begin(s, link, y, claimed):
    """The first queued is issued."""
    mine, layer, size, ends = s["links"][link], layer_of(s, y), copies(s)[y]["bytes"], send(s, link, y)
    if s["has_admit"] == 1:
        owned(s)[y]["bypasses"] = 1 if claimed == BYPASSED else 0
    at = place(s, link, mine["flight_end"])
    flight(s)[at], lands(s)[at] = y, NEVER_DUE if s["link"]["closed"] == 1 else ends
    if s["has_pieces"] == 1:
        piece_at(s)[at] = NEVER_DUE if s["link"]["closed"] == 1 else first_piece(s, link, y)
    mine["flight_end"] += 1
    if owned(s)[y]["prefetch"] == 1:
        mine["ask_first"] += 1
        count(s, PREFETCH_STARTED, layer, 1)
        count(s, BYTES_PREFETCH, layer, size)
    else:
        mine["demand_first"] += 1
        count(s, BYTES_DEMAND, layer, size)
    span(s, IS_TRANSFER, y, 0, ends - s["clock"]["time"], cause(s, y))


@fast
def cause(s, y):
    """Of a transfer, for the event log."""
    if owned(s)[y]["prefetch"] == 1:
        return BY_PREFETCH
    return BY_STREAM if owned(s)[y]["bypasses"] == 1 else BY_DEMAND


@fast
def next_landing(s):
    """When the next transfer is complete."""
    return landing(s, next_to_land(s))


@fast
def next_to_land(s):
    """The link whose transfer, or a first piece of one, is complete next."""
    if s["n_links"] == 1:
        return 0
    next_one = 0
    for link in range(1, s["n_links"]):
        if landing(s, link) < landing(s, next_one):
            next_one = link
    return next_one


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
def lands_at(s, y):
    """When y is complete, of which compute has the first piece, ns."""
    link = home_of(s, y)
    return lands(s)[place(s, link, s["links"][link]["flight_first"])]


@fast
def complete(s, hooks):
    """One LINK event: resident, and compute is woken if it waits for this copy. The caller wakes the links."""
    link = next_to_land(s)
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        show_piece(s, link)
        return
    told = s["has_pieces"] == 1 and s["links"][link]["pieced"] == 1
    y = take_landed(s, link)
    land(s, hooks, y)
    if owned(s)[y]["prefetch"] == 0 or owned(s)[y]["awaited"] == 1:
        if not told:
            call_up(s, y)
            resume(s)
    elif s["waits_for_all"] == 1:  # it may leave room for nothing more to come
        resume(s)


@called
def show_piece(s, link):
    """One LINK event: compute is woken if it waits for this copy, as if it were complete."""
    y = flight(s)[place(s, link, s["links"][link]["flight_first"])]
    s["links"][link]["pieced"] = 1
    if owned(s)[y]["prefetch"] == 0 or owned(s)[y]["awaited"] == 1:
        call_up(s, y)
        resume(s)


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


# what others ask


@fast
def any_link_is_busy(s):
    """Whether something is on its way, or a demand is about to be."""
    if s["has_loading"] == 1 and any_announced(s):
        return True
    for link in range(s["n_links"]):
        if s["links"][link]["flight_first"] < s["links"][link]["flight_end"] or demand_waits(s, link):
            return True
    return False


@called
def any_in_flight(s):
    """Whether something is on its way."""
    for link in range(s["n_links"]):
        if s["links"][link]["flight_first"] < s["links"][link]["flight_end"]:
            return True
    return False


@fast
def demand_waits(s, link):
    """Whether a demand waits to start."""
    return s["links"][link]["demand_first"] < s["links"][link]["demand_end"]


@fast
def prefetches_wait(s):
    """Whether a prefetch waits to start."""
    for link in range(s["n_links"]):
        if s["links"][link]["ask_first"] < s["links"][link]["ask_end"]:
            return True
    return False


@fast
def nothing_queued(s):
    """Whether no transfer waits to start."""
    for link in range(s["n_links"]):
        if demand_waits(s, link) or s["links"][link]["ask_first"] < s["links"][link]["ask_end"]:
            return False
    return True


@fast
def meet(s, y):
    """A demand waits for this transfer."""
    mine = owned(s)[y]
    if mine["prefetch"] == 1 and mine["awaited"] == 0:
        mine["awaited"] = 1
        count(s, PREFETCH_USED, layer_of(s, y), 1)
        if s["has_pieces"] == 1 and its_piece_is_here(s, y):
            call_up(s, y)


@fast
def its_piece_is_here(s, y):
    """Whether y is the next to land, and its first piece has arrived."""
    mine = s["links"][home_of(s, y)]
    return mine["pieced"] == 1 and flight(s)[place(s, home_of(s, y), mine["flight_first"])] == y


@called
def clear_links(s):
    """Nothing is queued, and what is in flight is abandoned."""
    for link in range(s["n_links"]):
        mine = s["links"][link]
        mine["demand_first"], mine["ask_first"], mine["flight_first"] = (
            mine["demand_end"],
            mine["ask_end"],
            mine["flight_end"],
        )
        mine["pieced"] = 0
        free(s, link)
    for y in range(s["n_copies"]):
        owned(s)[y]["bypasses"] = 0


@fast
def close_links(s):
    """The run is over: what is issued from here on does not land any more."""
    s["link"]["closed"] = 1
