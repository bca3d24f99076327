"""The books: one addition per count. What a request cost is the difference of the books at its two ends."""

from __future__ import annotations

from results.result import COUNTERS, LIFETIME_BUCKETS
from simulator.compiled.runtime.jit import bit_length, called, fast
from simulator.compiled.runtime.state import before, cells, lifetimes, now, pass_row, row_times, rows

WIDTH = len(COUNTERS)
BUCKETS = LIFETIME_BUCKETS
(
    ACCESSES, ASSIGNMENTS, HITS, LATE, MISSES, COMPULSORY, COLLISIONS, CAPACITY, PREFETCH_ISSUED, PREFETCH_STARTED,
    PREFETCH_CANCELLED, PREFETCH_DROPPED, PREFETCH_HITS, PREFETCH_USED, PREDICTED, PREDICTED_DEMANDED, PREDICTABLE,
    EVICTIONS, INSERTIONS, DECLINED, DROPPED, SUBSTITUTED, CPU_EXECUTED, LOW_PRECISION, BYTES_DEMAND, BYTES_PREFETCH,
    BYTES_WASTED, BYTES_UNUSED_AT_END, LINK_BUSY_NS, DENSE_NS, EXPERT_NS, STALL_NS, ASSIGNMENTS_KEPT, MASS, MASS_KEPT,
    MASS_LOW_PRECISION, MASS_SUBSTITUTED, MASS_DROPPED, RANK_DISPLACEMENT, VARIATION,
) = range(WIDTH)  # fmt: skip

#: Columns of a request's times.
START, FIRST, DECODE, PASSES, END, TOKENS = range(6)
TIMES = 6
NO_FIRST = -1  #: no prompt
NO_ROW = -1


@fast
def count(w, counter, layer, amount):
    """Add to a counter of a layer, in the phase of the pass in progress."""
    cells(w)[(layer * 2 + now(w)["phase"]) * WIDTH + counter] += amount


@fast
def count_here(w, counter, amount):
    """Add to a counter of the layer in progress."""
    cells(w)[w["page"] + counter] += amount


@called
def lived(w, layer, steps):
    """A copy of the layer was evicted after so many steps."""
    lifetimes(w)[(layer * 2 + now(w)["phase"]) * BUCKETS + min(bit_length(steps), BUCKETS - 1)] += 1


@called
def begin_pass(w):
    """Charge to this pass's request from here on."""
    row = pass_row(w)[w["index"]]
    if row != w["row"]:
        close_row(w)
        w["row"] = row
    times = row_times(w)
    if times[row, TOKENS] == 0:
        times[row, START], times[row, FIRST] = w["time"], NO_FIRST
    times[row, TOKENS] += w["tokens"]


@called
def end_pass(w):
    """The pass's part in TTFT or TPOT."""
    row, times = w["row"], row_times(w)
    times[row, END] = w["time"]
    if now(w)["phase"] == 0:
        times[row, FIRST] = w["time"] - times[row, START]
    else:
        times[row, DECODE] += w["time"] - w["began"]
        times[row, PASSES] += 1


@called
def close_row(w):
    """What the books gained since the last call is what the request in progress cost."""
    for counter in range(WIDTH):
        total = 0
        for cell in range(counter, w["n_cells"], WIDTH):
            total += cells(w)[cell]
        if w["row"] != NO_ROW:
            rows(w)[w["row"], counter] += total - before(w)[counter]
        before(w)[counter] = total
