"""Simulated time: the next event, and the completion time of each transfer.

Events are ordered by (time, phase, resource, issue number), with LINK before CPU before COMPUTE. A queue of events is
not needed: transfers of a link complete in the order of their issue, and CPU and compute have one event each.
"""

from __future__ import annotations

from moereplay.simulator.compiled.counters import LINK_BUSY_NS, count_at
from moereplay.simulator.compiled.state import kind_of
from moereplay.simulator.jit.marks import fast
from moereplay.simulator.rates import MILLION, NOT_YET

# The program counter of compute: its states, and how an action makes compute continue or stay busy.

#: States of the program counter.
STEP, GATE, LOOK, SUGGEST, SHARE, LOAD, LOADED, BEGIN, PRELOAD, PRELOADED, TURN, RAN, CLOSE, OVER = range(14)


@fast
def go_to(s, state):
    s["compute"]["program_counter"] = state


@fast
def busy_until(s, spent, state):
    """Keep compute busy for `spent` ns, then continue in `state`."""
    busy(s, spent)
    go_to(s, state)


@fast
def suggest_if(s, due, then):
    """Continue in `then`, by way of the prefetch policy if there is one and it is due."""
    if due and s["has_suggest"] == 1:
        s["compute"]["then"] = then
        go_to(s, SUGGEST)
    else:
        go_to(s, then)


@fast
def is_over(s):
    """Return whether every pass has been computed."""
    return s["compute"]["program_counter"] == OVER


#: The time of an event that is not scheduled.
NEVER_DUE = (1 << 63) - 1
#: Kinds of events.
OF_LINK, OF_CPU, OF_COMPUTE, OF_NOTHING = range(4)


@fast
def advance(s, time):
    """Set the time, ns."""
    s["clock"]["time"] = time


@fast
def next_event(s, lands):
    """Advance to the next event and return its kind. `lands`: time of the next transfer's completion, ns."""
    clock = s["clock"]
    if lands <= clock["cpu_at"] and lands <= clock["compute_at"] and lands < NEVER_DUE:
        clock["time"], clock["wake"] = lands, 1
        return OF_LINK
    if clock["cpu_at"] <= clock["compute_at"] and clock["cpu_at"] < NEVER_DUE:
        clock["time"], clock["cpu_at"] = clock["cpu_at"], NEVER_DUE
        return OF_CPU
    if clock["compute_at"] < NEVER_DUE:
        clock["time"], clock["compute_at"], clock["go"] = clock["compute_at"], NEVER_DUE, 1
        return OF_COMPUTE
    return OF_NOTHING


# compute and CPU


@fast
def busy(s, spent):
    """Keep compute busy for `spent` ns, or until the caller reports its end, and wake the links."""
    clock = s["clock"]
    clock["compute_at"] = clock["time"] + spent if s["external"] == 0 else NEVER_DUE
    clock["go"], clock["wake"] = 0, 1


@fast
def wait(s):
    """Block compute until `resume`, and wake the links."""
    s["clock"]["waiting"], s["clock"]["go"], s["clock"]["wake"] = 1, 0, 1


@fast
def resume(s):
    """Schedule blocked compute as a COMPUTE event at the current time."""
    if s["clock"]["waiting"] == 1:
        s["clock"]["waiting"] = 0
        s["clock"]["compute_at"] = s["clock"]["time"]


@fast
def go_on(s):
    """Let compute continue without an event."""
    s["clock"]["go"] = 1


@fast
def stop(s):
    s["clock"]["go"] = 0


@fast
def cpu_busy_until(s, time):
    """Keep the CPU busy until then, ns."""
    s["clock"]["cpu_at"] = time


@fast
def cpu_is_busy(s):
    """Return whether the CPU computes: transfers are slower where it shares memory with the links."""
    return s["has_resolve"] == 1 and s["clock"]["cpu_at"] != NEVER_DUE


# the links


@fast
def wake_links(s):
    """Request that links start transfers before the next event."""
    s["clock"]["wake"] = 1


@fast
def links_are_woken(s):
    """Return whether `wake_links` was called since the last call, and clear the request."""
    woken = s["clock"]["wake"] == 1
    s["clock"]["wake"] = 0
    return woken


# the wire of a link: latencies overlap, bytes do not


@fast
def send(s, link, y, page):
    """Start a transfer of copy y and return its completion time, ns; `link` is a row of `links`, `page` its layer's.

    Latencies overlap; bytes follow those of earlier transfers. Return the current time if the caller reports ends.
    """
    if s["external"] == 1:
        return s["clock"]["time"]
    return move(s, link, y, on_the_wire(s, link, y), page)


@fast
def move(s, link, y, whole, page):
    """Keep the wire busy for `whole` ns after those of earlier transfers, and the latency of copy y; return the end."""
    mine, time = s["links"][link], s["clock"]["time"]
    begins, latency = max(time, mine["last_done"]), mine["latency_ns"]
    if s["has_start"] == 1 and mine["last_done"] < time:
        latency += s.start_ns[wire_of(s, link, y)]
    if s["victim_ns"] > 0:
        latency += s["cache"]["evicted_now"] * s["victim_ns"]
    ends = max(time + latency, mine["last_done"]) + whole
    mine["last_done"] = ends
    count_at(s, page, LINK_BUSY_NS, ends - begins)
    return ends


@fast
def on_the_wire(s, link, y):
    """Return how long the bytes of copy y occupy the wire if they start now, ns."""
    at = wire_of(s, link, y)
    return s.slow_wire_ns[at] if cpu_is_busy(s) else s.wire_ns[at]


@fast
def wire_of(s, link, y):
    """Return the index of copy y on a link in tables of transfer times."""
    return kind_of(s, y) if s["n_links"] == 1 else link * s["n_kinds"] + kind_of(s, y)


@fast
def first_piece(s, link, y):
    """Return when the first piece of copy y arrives, ns; y has just been sent."""
    whole = on_the_wire(s, link, y)
    return s["links"][link]["last_done"] - whole + part(whole, s["links"][link]["first"], MILLION)


@fast
def part(ns, shares, whole):
    """Return that many of `whole` equal shares of a time, rounded up, without overflow of 64 bits."""
    return ns // whole * shares + (ns % whole * shares + whole - 1) // whole


@fast
def free(s, link):
    """Let the next transfer start without waiting for earlier ones."""
    s["links"][link]["last_done"] = NOT_YET
