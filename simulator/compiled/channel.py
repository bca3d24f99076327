"""The wire of a link: latencies overlap, bytes do not."""

from __future__ import annotations

from moereplay.simulator.compiled.clock import cpu_is_busy
from moereplay.simulator.compiled.counters import LINK_BUSY_NS, count
from moereplay.simulator.compiled.state import kind_of, layer_of, slow_wire_ns, wire_ns
from moereplay.simulator.jit.marks import fast

NOT_YET = -1  #: before the first nanosecond
MILLION = 1_000_000


@fast
def send(s, link, y):
    """A transfer of y starts: its latency runs at once, its bytes after those of the transfers before it.

    Returns when it is complete, ns; now, if the caller will say. `link` is a row of `links`.
    """
    mine, time = s["links"][link], s["clock"]["time"]
    if s["external"] == 1:
        return time
    begins, latency = max(time, mine["last_done"]), mine["latency_ns"]
    if s["has_start"] == 1 and mine["last_done"] < time:
        latency += mine["start_ns"]
    mine["last_done"] = max(time + latency, mine["last_done"]) + on_the_wire(s, link, y)
    count(s, LINK_BUSY_NS, layer_of(s, y), mine["last_done"] - begins)
    return mine["last_done"]


@fast
def on_the_wire(s, link, y):
    """For how long the bytes of y keep the wire if they start now, ns."""
    kind = kind_of(s, y) if s["n_links"] == 1 else link * s["n_kinds"] + kind_of(s, y)
    return slow_wire_ns(s)[kind] if cpu_is_busy(s) else wire_ns(s)[kind]


@fast
def first_piece(s, link, y):
    """When the first piece of y is there, ns: y was sent now."""
    whole = on_the_wire(s, link, y)
    return s["links"][link]["last_done"] - whole + part(whole, s["links"][link]["first"])


@fast
def part(ns, millionths):
    """So much of a time, rounded up, in 64 bits."""
    return ns // MILLION * millionths + (ns % MILLION * millionths + MILLION - 1) // MILLION


@fast
def free(s, link):
    """The next transfer waits for nothing."""
    s["links"][link]["last_done"] = NOT_YET
