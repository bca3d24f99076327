"""The wire of a link: latencies overlap, bytes do not."""

from __future__ import annotations

from simulator.compiled.clock import cpu_is_busy
from simulator.compiled.counters import LINK_BUSY_NS, count
from simulator.compiled.runtime.jit import fast
from simulator.compiled.runtime.state import kind_of, layer_of, slow_wire_ns, wire_ns


@fast
def send(s, link, y):
    """A transfer of y starts: its latency runs at once, its bytes after those of the transfers before it.

    Returns when it is complete, ns. `link` is a row of `links`.
    """
    mine, time = s["links"][link], s["clock"]["time"]
    begins = max(time, mine["last_done"])
    kind = kind_of(s, y) if s["n_links"] == 1 else link * s["n_kinds"] + kind_of(s, y)
    wire = slow_wire_ns(s)[kind] if cpu_is_busy(s) else wire_ns(s)[kind]
    mine["last_done"] = max(time + mine["latency_ns"], mine["last_done"]) + wire
    count(s, LINK_BUSY_NS, layer_of(s, y), mine["last_done"] - begins)
    return mine["last_done"]


@fast
def free(s, link):
    """The next transfer waits for nothing."""
    s["links"][link]["last_done"] = 0
