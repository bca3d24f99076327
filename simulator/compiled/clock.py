"""The clock: which event is next. (time, phase, resource, issue number), with LINK before CPU before COMPUTE.

No queue of events is needed: a link's transfers land in the order of their issue, and CPU and compute have one event
each.
"""

from __future__ import annotations

from moereplay.simulator.jit.marks import fast

#: No event: later than any time.
NEVER_DUE = (1 << 63) - 1
#: What an event is of.
OF_LINK, OF_CPU, OF_COMPUTE, OF_NOTHING = range(4)


@fast
def advance(s, time):
    """Time moves on, ns."""
    s["clock"]["time"] = time


@fast
def next_event(s, lands):
    """Time moves on to the next event; returns what it is of. `lands`: when the next transfer is complete."""
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
    """Compute is busy for so long, or until the caller says; the links are woken now."""
    clock = s["clock"]
    clock["compute_at"] = clock["time"] + spent if s["external"] == 0 else NEVER_DUE
    clock["go"], clock["wake"] = 0, 1


@fast
def wait(s):
    """Compute waits until it is resumed; the links are woken now."""
    s["clock"]["waiting"], s["clock"]["go"], s["clock"]["wake"] = 1, 0, 1


@fast
def resume(s):
    """Compute goes on as a COMPUTE event of this time, if it waits."""
    if s["clock"]["waiting"] == 1:
        s["clock"]["waiting"] = 0
        s["clock"]["compute_at"] = s["clock"]["time"]


@fast
def go_on(s):
    """Compute goes on without an event."""
    s["clock"]["go"] = 1


@fast
def stop(s):
    """Compute is over."""
    s["clock"]["go"] = 0


@fast
def cpu_busy(s, spent):
    """The CPU is busy for so long."""
    s["clock"]["cpu_at"] = s["clock"]["time"] + spent


@fast
def cpu_is_busy(s):
    """Whether the CPU computes: then transfers are slower where it shares memory with the links."""
    return s["has_resolve"] == 1 and s["clock"]["cpu_at"] != NEVER_DUE


# the links


@fast
def wake_links(s):
    """The links start what they can before the next event."""
    s["clock"]["wake"] = 1


@fast
def links_are_woken(s):
    """Whether they were woken since the last call."""
    woken = s["clock"]["wake"] == 1
    s["clock"]["wake"] = 0
    return woken
