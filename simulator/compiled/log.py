"""The event log: numbers in the kernel, names for readers. What does not fit is counted, so that a second run fits."""

from __future__ import annotations

from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.state import expert_of, layer_of, log, now

KINDS = (
    "dense", "expert", "cpu", "transfer", "hits", "late", "compulsory", "collisions", "capacity", "evict", "promote",
    "cancel", "drop", "reset",
)  # fmt: skip
(
    IS_DENSE, IS_EXPERT, IS_CPU, IS_TRANSFER, IS_HIT, IS_LATE, IS_COMPULSORY, IS_COLLISION, IS_CAPACITY, IS_EVICT,
    IS_PROMOTE, IS_CANCEL, IS_DROP, IS_RESET,
) = range(len(KINDS))  # fmt: skip
#: Causes are numbers below zero, or the copy that comes in.
CAUSES = ("", "compute", "miss", "demand", "prefetch", "streamed", "gate", "reset")
BY_COMPUTE, BY_MISS, BY_DEMAND, BY_PREFETCH, BY_STREAM, BY_GATE, BY_RESET = range(-1, -len(CAUSES), -1)
NO_COPY = -1


@fast
def note(w, kind, y, cause):
    """Something that takes no time."""
    span(w, kind, y, 0, 0, cause)


@fast
def span(w, kind, y, after, spent, cause):
    """Something that starts `after` ns from now and takes `spent`."""
    if w["logs"] == 1:
        w["line_kind"], w["line_cause"], w["line_copy"] = kind, cause, y
        w["line_begin"], w["line_end"] = w["time"] + after, w["time"] + after + spent
        write(w)


@called
def write(w):
    """One line, if there is room."""
    at, y = w["lines"], w["line_copy"]
    w["lines"] = at + 1
    if at >= w["n_log"]:
        return
    line = log(w)[at]
    line["t0"], line["t1"], line["kind"], line["cause"] = (
        w["line_begin"],
        w["line_end"],
        w["line_kind"],
        w["line_cause"],
    )
    line["pass"], line["layer"], line["expert"], line["precision"] = now(w)["pass"], now(w)["layer"], NO_COPY, 0
    if y != NO_COPY:
        x, layer = expert_of(w, y), layer_of(w, y)
        line["layer"], line["expert"], line["precision"] = layer, x - layer * w["experts"], y - x * w["precisions"]
