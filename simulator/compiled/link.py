"""The link: a queue, demand ahead of prefetch; transfers go first in first out and are never interrupted."""

from __future__ import annotations

from policies.contract import ABSENT, QUEUED
from simulator.compiled.cache import set_state
from simulator.compiled.clock import NEVER_DUE, cpu_is_busy, resume
from simulator.compiled.counters import (
    BYTES_DEMAND,
    BYTES_PREFETCH,
    LINK_BUSY_NS,
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
    kind_of,
    lands,
    layer_of,
    owned,
    ready,
    slow_wire_ns,
    wire_ns,
)
from simulator.compiled.space import BYPASSED, REFUSED
from simulator.compiled.transfers import claim, land


@fast
def mask(s, at):
    """A ring's index of a position."""
    return at & (s["n_ring"] - 1)


# the queue


@called
def fetch(s, y):
    """Queue a demand, behind other demands and ahead of all prefetches."""
    enqueue(s, y, 0)
    demands(s)[mask(s, s["link"]["demand_end"])] = y
    s["link"]["demand_end"] += 1


@called
def prefetch(s, y, target):
    """Queue a prefetch, behind older ones."""
    enqueue(s, y, 1)
    owned(s)[y]["target"] = target
    asks(s)[mask(s, s["link"]["ask_end"])] = y
    s["link"]["ask_end"] += 1
    count(s, PREFETCH_ISSUED, layer_of(s, y), 1)


@fast
def enqueue(s, y, is_prefetch):
    """A new transfer of y waits for the link."""
    mine = owned(s)[y]
    set_state(s, y, QUEUED)
    mine["prefetch"], mine["awaited"], mine["bypasses"] = is_prefetch, 0, 0


@called
def cancel(s, step):
    """Drop every queued prefetch aimed at this step or an earlier one; the others keep their order."""
    kept = s["link"]["ask_first"]
    for at in range(s["link"]["ask_first"], s["link"]["ask_end"]):
        y = asks(s)[mask(s, at)]
        if owned(s)[y]["target"] <= step:
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)
        else:
            asks(s)[mask(s, kept)] = y
            kept += 1
    s["link"]["ask_end"] = kept


@called
def abandon(s, y, counter, line):
    """A queued prefetch will not be fetched after all."""
    set_state(s, y, ABSENT)
    count(s, counter, layer_of(s, y), 1)
    note(s, line, y, BY_PREFETCH)


# transfers


@fast
def start_transfers(s, hooks):
    """Start whatever can start now: demands first, and one that finds no room holds the link."""
    while may_start(s):
        y = first_queued(s)
        claimed = claim(s, hooks, y)
        if claimed != REFUSED:
            begin(s, y, claimed)
        elif owned(s)[y]["prefetch"] == 0:
            return
        else:
            drop(s, y)


@fast
def may_start(s):
    """Whether something is queued and the link has room for it."""
    queued = s["link"]["demand_first"] < s["link"]["demand_end"] or s["link"]["ask_first"] < s["link"]["ask_end"]
    return queued and s["link"]["flight_end"] - s["link"]["flight_first"] < s["depth"]


@fast
def first_queued(s):
    """Who starts next."""
    if s["link"]["demand_first"] < s["link"]["demand_end"]:
        return demands(s)[mask(s, s["link"]["demand_first"])]
    return asks(s)[mask(s, s["link"]["ask_first"])]


@fast
def drop(s, y):
    """The first queued prefetch finds no room, and does not wait for any."""
    s["link"]["ask_first"] += 1
    abandon(s, y, PREFETCH_DROPPED, IS_DROP)


@fast
def begin(s, y, claimed):
    """The first queued is issued: its latency runs at once, its bytes after those of the transfers before it."""
    layer, size, begins = layer_of(s, y), copies(s)[y]["bytes"], max(s["clock"]["time"], s["link"]["last_done"])
    wire = slow_wire_ns(s)[kind_of(s, y)] if cpu_is_busy(s) else wire_ns(s)[kind_of(s, y)]
    s["link"]["last_done"] = max(s["clock"]["time"] + s["latency_ns"], s["link"]["last_done"]) + wire
    if s["has_admit"] == 1:
        owned(s)[y]["bypasses"] = 1 if claimed == BYPASSED else 0
    at = mask(s, s["link"]["flight_end"])
    flight(s)[at], lands(s)[at] = y, s["link"]["last_done"]
    s["link"]["flight_end"] += 1
    if owned(s)[y]["prefetch"] == 1:
        s["link"]["ask_first"] += 1
        count(s, PREFETCH_STARTED, layer, 1)
        count(s, BYTES_PREFETCH, layer, size)
    else:
        s["link"]["demand_first"] += 1
        count(s, BYTES_DEMAND, layer, size)
    count(s, LINK_BUSY_NS, layer, s["link"]["last_done"] - begins)
    span(s, IS_TRANSFER, y, 0, s["link"]["last_done"] - s["clock"]["time"], cause(s, y))


@fast
def cause(s, y):
    """Of a transfer, for the event log."""
    if owned(s)[y]["prefetch"] == 1:
        return BY_PREFETCH
    return BY_STREAM if owned(s)[y]["bypasses"] == 1 else BY_DEMAND


@fast
def next_landing(s):
    """When the next transfer is complete."""
    if s["link"]["flight_first"] == s["link"]["flight_end"]:
        return NEVER_DUE
    return lands(s)[mask(s, s["link"]["flight_first"])]


@fast
def complete(s, hooks):
    """One LINK event: resident, and compute is woken if it waits for this copy. The caller wakes the link."""
    y = take_landed(s)
    land(s, hooks, y)
    if owned(s)[y]["prefetch"] == 0 or owned(s)[y]["awaited"] == 1:
        call_up(s, y)
        resume(s)


@fast
def take_landed(s):
    """The oldest transfer, which is complete."""
    y = flight(s)[mask(s, s["link"]["flight_first"])]
    s["link"]["flight_first"] += 1
    return y


@fast
def call_up(s, y):
    """A copy that compute waits for is there."""
    ready(s)[mask(s, s["link"]["ready_end"])] = y
    s["link"]["ready_end"] += 1


# what others ask


@fast
def link_is_busy(s):
    """Whether something is on its way, or a demand is about to be."""
    return s["link"]["flight_first"] < s["link"]["flight_end"] or s["link"]["demand_first"] < s["link"]["demand_end"]


@fast
def nothing_queued(s):
    """Whether no transfer waits to start."""
    return s["link"]["demand_first"] == s["link"]["demand_end"] and s["link"]["ask_first"] == s["link"]["ask_end"]


@fast
def meet(s, y):
    """A demand waits for this transfer."""
    mine = owned(s)[y]
    if mine["prefetch"] == 1 and mine["awaited"] == 0:
        mine["awaited"] = 1
        count(s, PREFETCH_USED, layer_of(s, y), 1)


@called
def clear_link(s):
    """Nothing is queued, and what is in flight is abandoned."""
    link = s["link"]
    link["demand_first"], link["ask_first"], link["flight_first"] = (
        link["demand_end"],
        link["ask_end"],
        link["flight_end"],
    )
    link["last_done"] = 0
    for y in range(s["n_copies"]):
        owned(s)[y]["bypasses"] = 0
