"""Counters: one addition per count. What a request cost is the difference of the counters at its two ends.

What a pass does once is charged to the request and phase of its first row, what belongs to a token to its own.
"""

from __future__ import annotations

from moereplay.results.counters import COUNTERS, LIFETIME_BUCKETS
from moereplay.simulator.compiled.rows import row_at
from moereplay.simulator.compiled.state import (
    before,
    cells,
    lifetimes,
    now,
    pass_number,
    row_number,
    row_opens,
    row_phase,
    row_times,
    rows,
)
from moereplay.simulator.jit.marks import bit_length, called, fast

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


@fast
def count_for(s, t, counter, layer, amount):
    """Add to a counter of a layer what belongs to a token, the t-th of the pass."""
    if s["batched"] == 0:
        count(s, counter, layer, amount)
    else:
        count_apart(s, row_at(s, t), counter, layer, amount)


@called
def count_apart(s, row, counter, layer, amount):
    """To the row's request and phase, and to no other request by the difference of its ends."""
    cells(s)[(layer * 2 + row_phase(s)[row]) * WIDTH + counter] += amount
    rows(s)[row_number(s)[row], counter] += amount
    before(s)[counter] += amount


@fast
def lived(s, layer, steps):
    """A copy of the layer was evicted after so many steps."""
    lifetimes(s)[(layer * 2 + now(s)["phase"]) * BUCKETS + min(bit_length(steps), BUCKETS - 1)] += 1


@fast
def open_page(s, layer):
    """`count_here` counts for this layer, in the phase of the pass in progress."""
    s["counters"]["page"] = (layer * 2 + now(s)["phase"]) * WIDTH


@called
def begin_pass(s, index, tokens):
    """Charge to the request of this pass from here on; a request begins with its first row."""
    number = pass_number(s)[index]
    if number != s["counters"]["row"]:
        close_row(s)
        s["counters"]["row"] = number
    if s["batched"] == 0:
        begin_part(s, number, tokens)
    else:
        for t in range(tokens):
            begin_part(s, row_number(s)[row_at(s, t)], 1)


@fast
def begin_part(s, number, tokens):
    """So many rows of a request begin."""
    times = row_times(s)
    if times[number, TOKENS] == 0:
        times[number, START], times[number, FIRST] = s["clock"]["time"], NO_FIRST
    times[number, TOKENS] += tokens


@called
def end_pass(s, began):
    """The pass's part in TTFT or TPOT of every request in it; it began then, ns."""
    if s["batched"] == 0:
        end_part(s, s["counters"]["row"], now(s)["phase"], began)
    else:
        for t in range(now(s)["tokens"]):
            if row_opens(s)[row_at(s, t)] == 1:
                end_part(s, row_number(s)[row_at(s, t)], row_phase(s)[row_at(s, t)], began)


@fast
def end_part(s, number, phase, began):
    """The same of one request and phase."""
    times, time = row_times(s), s["clock"]["time"]
    times[number, END] = time
    if phase == 0:
        times[number, FIRST] = time - times[number, START]
    else:
        times[number, DECODE] += time - began
        times[number, PASSES] += 1


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
