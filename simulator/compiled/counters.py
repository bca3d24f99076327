"""Counters: one addition per count. What a request cost is the difference of the counters at its two ends."""

from __future__ import annotations

from results.counters import COUNTERS, LIFETIME_BUCKETS
from simulator.compiled.runtime.jit import bit_length, called, fast
from simulator.compiled.runtime.state import before, cells, lifetimes, now, pass_row, row_times, rows

WIDTH = len(COUNTERS)
BUCKETS = LIFETIME_BUCKETS
_COLUMNS = {name.upper(): column for column, name in enumerate(COUNTERS)}

#: Columns of a request's times.
START, FIRST, DECODE, PASSES, END, TOKENS = range(6)
TIMES = 6
NO_FIRST = -1  #: no prompt
NO_ROW = -1


def __getattr__(name: str) -> int:
    """The column of a counter, by its name in capitals: declared in `results.counters` alone."""
    if name not in _COLUMNS:
        raise AttributeError(f"no counter is declared as {name.lower()!r}")
    return _COLUMNS[name]


@fast
def count(s, counter, layer, amount):
    """Add to a counter of a layer, in the phase of the pass in progress."""
    cells(s)[(layer * 2 + now(s)["phase"]) * WIDTH + counter] += amount


@fast
def count_here(s, counter, amount):
    """Add to a counter of the layer in progress."""
    cells(s)[s["counters"]["page"] + counter] += amount


@called
def lived(s, layer, steps):
    """A copy of the layer was evicted after so many steps."""
    lifetimes(s)[(layer * 2 + now(s)["phase"]) * BUCKETS + min(bit_length(steps), BUCKETS - 1)] += 1


@fast
def open_page(s, layer):
    """`count_here` counts for this layer, in the phase of the pass in progress."""
    s["counters"]["page"] = (layer * 2 + now(s)["phase"]) * WIDTH


@called
def begin_pass(s, index, tokens):
    """Charge to the request of this pass from here on."""
    row = pass_row(s)[index]
    if row != s["counters"]["row"]:
        close_row(s)
        s["counters"]["row"] = row
    times = row_times(s)
    if times[row, TOKENS] == 0:
        times[row, START], times[row, FIRST] = s["clock"]["time"], NO_FIRST
    times[row, TOKENS] += tokens


@called
def end_pass(s, began):
    """The pass's part in TTFT or TPOT; it began then, ns."""
    row, times, time = s["counters"]["row"], row_times(s), s["clock"]["time"]
    times[row, END] = time
    if now(s)["phase"] == 0:
        times[row, FIRST] = time - times[row, START]
    else:
        times[row, DECODE] += time - began
        times[row, PASSES] += 1


@called
def close_row(s):
    """What the counters gained since the last call is what the request in progress cost."""
    for counter in range(WIDTH):
        total = 0
        for cell in range(counter, s["n_cells"], WIDTH):
            total += cells(s)[cell]
        if s["counters"]["row"] != NO_ROW:
            rows(s)[s["counters"]["row"], counter] += total - before(s)[counter]
        before(s)[counter] = total
