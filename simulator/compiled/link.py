"""The link: a queue, demand ahead of prefetch; transfers go first in first out and are never interrupted."""

from __future__ import annotations

from policies.contract import ABSENT, QUEUED
from simulator.compiled.cache import REFUSED
from simulator.compiled.counters import (
    BYTES_DEMAND,
    BYTES_PREFETCH,
    LINK_BUSY_NS,
    PREFETCH_CANCELLED,
    PREFETCH_DROPPED,
    PREFETCH_ISSUED,
    PREFETCH_STARTED,
    count,
)
from simulator.compiled.log import BY_DEMAND, BY_PREFETCH, BY_STREAM, IS_CANCEL, IS_DROP, IS_TRANSFER, note, span
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.state import (
    NOT_SOON,
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
from simulator.compiled.transfers import claim, land


@fast
def mask(w, at):
    """A ring's index of a position."""
    return at & (w["n_ring"] - 1)


# the queue


@called
def fetch(w, y):
    """Queue a demand, behind other demands and ahead of all prefetches."""
    enqueue(w, y, 0)
    demands(w)[mask(w, w["demand_end"])] = y
    w["demand_end"] += 1


@called
def prefetch(w, y, target):
    """Queue a prefetch, behind older ones."""
    enqueue(w, y, 1)
    owned(w)[y]["target"] = target
    asks(w)[mask(w, w["ask_end"])] = y
    w["ask_end"] += 1
    count(w, PREFETCH_ISSUED, layer_of(w, y), 1)


@fast
def enqueue(w, y, is_prefetch):
    """A new transfer of y waits for the link."""
    mine = owned(w)[y]
    copies(w)[y]["state"] = QUEUED
    mine["prefetch"], mine["awaited"], mine["streamed"] = is_prefetch, 0, 0


@called
def cancel(w, step):
    """Drop every queued prefetch aimed at this step or an earlier one; the others keep their order."""
    kept = w["ask_first"]
    for at in range(w["ask_first"], w["ask_end"]):
        y = asks(w)[mask(w, at)]
        if owned(w)[y]["target"] <= step:
            abandon(w, y, PREFETCH_CANCELLED, IS_CANCEL)
        else:
            asks(w)[mask(w, kept)] = y
            kept += 1
    w["ask_end"] = kept


@called
def abandon(w, y, counter, line):
    """A queued prefetch will not be fetched after all."""
    copies(w)[y]["state"] = ABSENT
    count(w, counter, layer_of(w, y), 1)
    note(w, line, y, BY_PREFETCH)


# transfers


@fast
def wake(w, hooks):
    """Start whatever can start now."""
    while may_start(w):
        y = first_queued(w)
        if claim(w, hooks, y) != REFUSED:
            begin(w, y)
        elif owned(w)[y]["prefetch"] == 0:  # it waits and holds the link
            return
        else:
            drop(w, y)


@fast
def may_start(w):
    """Whether something is queued and the link has room for it."""
    queued = w["demand_first"] < w["demand_end"] or w["ask_first"] < w["ask_end"]
    return queued and w["flight_end"] - w["flight_first"] < w["depth"]


@fast
def first_queued(w):
    """Who starts next."""
    if w["demand_first"] < w["demand_end"]:
        return demands(w)[mask(w, w["demand_first"])]
    return asks(w)[mask(w, w["ask_first"])]


@fast
def drop(w, y):
    """The first queued prefetch finds no room, and does not wait for any."""
    w["ask_first"] += 1
    abandon(w, y, PREFETCH_DROPPED, IS_DROP)


@fast
def begin(w, y):
    """The first queued is issued: its latency runs at once, its bytes after those of the transfers before it."""
    layer, size, begins = layer_of(w, y), copies(w)[y]["bytes"], max(w["time"], w["last_done"])
    wire = slow_wire_ns(w)[kind_of(w, y)] if w["beside_cpu"] == 1 else wire_ns(w)[kind_of(w, y)]
    w["last_done"] = max(w["time"] + w["latency_ns"], w["last_done"]) + wire
    at = mask(w, w["flight_end"])
    flight(w)[at], lands(w)[at] = y, w["last_done"]
    w["flight_end"] += 1
    if owned(w)[y]["prefetch"] == 1:
        w["ask_first"] += 1
        count(w, PREFETCH_STARTED, layer, 1)
        count(w, BYTES_PREFETCH, layer, size)
    else:
        w["demand_first"] += 1
        count(w, BYTES_DEMAND, layer, size)
    count(w, LINK_BUSY_NS, layer, w["last_done"] - begins)
    span(w, IS_TRANSFER, y, 0, w["last_done"] - w["time"], cause(w, y))


@fast
def cause(w, y):
    """Of a transfer, for the event log."""
    if owned(w)[y]["prefetch"] == 1:
        return BY_PREFETCH
    return BY_STREAM if owned(w)[y]["streamed"] == 1 else BY_DEMAND


@fast
def next_landing(w):
    """When the next transfer is complete."""
    if w["flight_first"] == w["flight_end"]:
        return NOT_SOON
    return lands(w)[mask(w, w["flight_first"])]


@fast
def complete(w, hooks):
    """One LINK event: resident, and compute hears of it if it waits for this copy. The caller wakes the link."""
    y = flight(w)[mask(w, w["flight_first"])]
    w["flight_first"] += 1
    land(w, hooks, y)
    if owned(w)[y]["prefetch"] == 0 or owned(w)[y]["awaited"] == 1:
        call_up(w, y)
        ring(w)


@fast
def call_up(w, y):
    """What compute waits for is there."""
    ready(w)[mask(w, w["ready_end"])] = y
    w["ready_end"] += 1


@fast
def ring(w):
    """Compute goes on as a COMPUTE event of this time, if it waits."""
    if w["waiting"] == 1:
        w["waiting"] = 0
        w["compute_at"] = w["time"]
