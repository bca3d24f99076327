"""The event log: numbers in the kernel, names for readers. What does not fit is counted, so that a second run fits."""

from __future__ import annotations

from moereplay.simulator.compiled.state import expert_of, layer_of, log, now
from moereplay.simulator.jit.marks import called, fast

KINDS = (
    "dense", "expert", "cpu", "transfer", "hits", "late", "compulsory", "collisions", "capacity", "evict", "promote",
    "cancel", "drop", "reset", "fill", "load",
)  # fmt: skip
(
    IS_DENSE, IS_EXPERT, IS_CPU, IS_TRANSFER, IS_HIT, IS_LATE, IS_COMPULSORY, IS_COLLISION, IS_CAPACITY, IS_EVICT,
    IS_PROMOTE, IS_CANCEL, IS_DROP, IS_RESET, IS_FILL, IS_LOAD,
) = range(len(KINDS))  # fmt: skip
#: Causes are numbers below zero, or the copy that comes in.
CAUSES = ("", "compute", "miss", "demand", "prefetch", "streamed", "gate", "reset")
BY_COMPUTE, BY_MISS, BY_DEMAND, BY_PREFETCH, BY_STREAM, BY_GATE, BY_RESET = range(-1, -len(CAUSES), -1)
NO_COPY = -1


@fast
def note(s, kind, y, cause):
    """An event that takes no time."""
    span(s, kind, y, 0, 0, cause)


@fast
def span(s, kind, y, after, spent, cause):
    """Something that starts `after` ns from now and takes `spent`."""
    if s["logs"] == 1:
        begin = s["clock"]["time"] + after
        write(s, kind, y, begin, begin + spent, cause)


@called
def write(s, kind, y, begin, end, cause):
    """One line, if there is space; it is counted in any case."""
    at = s["log"]["lines"]
    s["log"]["lines"] = at + 1
    if at >= s["n_log"]:
        return
    line = log(s)[at]
    line["t0"], line["t1"], line["kind"], line["cause"] = begin, end, kind, cause
    line["pass"], line["layer"], line["expert"], line["precision"] = now(s)["pass"], now(s)["layer"], NO_COPY, 0
    if y != NO_COPY:
        x, layer = expert_of(s, y), layer_of(s, y)
        line["layer"], line["expert"], line["precision"] = layer, x - layer * s["experts"], y - x * s["precisions"]
