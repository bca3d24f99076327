"""Counters and the event log.

A count is one addition; the counters of a request are the difference of totals at its two ends. Work done once per
pass is charged to the request and phase of its first row, work per token to the token's own.
"""

from __future__ import annotations

from moereplay.results.counters import BY_LAYER, COUNTERS, LIFETIME_BUCKETS
from moereplay.simulator.compiled.state import expert_of, layer_of, row_at
from moereplay.simulator.interface import NO_COPY
from moereplay.simulator.jit.marks import bit_length, called, fast
from moereplay.traces.drafts import KNOWN, REJECTED

#: The counters that most steps write come first: they lie in four lines of the processor's cache in place of seven.
_FIRST = (
    *("accesses", "assignments", "hits", "misses", "compulsory", "collisions", "capacity", "steps", "complete_steps"),
    *("evictions", "insertions", "bytes_demand", "link_busy_ns", "dense_ns", "expert_ns", "stall_ns"),
    *("assignments_kept", "mass", "mass_kept", "late", "predicted", "predicted_demanded", "predictable"),
    *("prefetch_issued", "prefetch_started", "prefetch_used", "prefetch_hits", "prefetch_cancelled"),
    *("prefetch_dropped", "bytes_prefetch"),
)
_ORDER = [*_FIRST, *(name for name in COUNTERS if name not in _FIRST)]
_COLUMNS = {name.upper(): column for column, name in enumerate(_ORDER)}
#: The columns of the counters in the order of their declaration.
DECLARED = [_ORDER.index(name) for name in COUNTERS]
WIDTH = -(-len(_ORDER) // 8) * 8  #: whole lines
BUCKETS = LIFETIME_BUCKETS
DRAFT_ROWS, DRAFT_REJECTED = _COLUMNS["DRAFT_ROWS"], _COLUMNS["DRAFT_REJECTED"]
LAYERED = [_COLUMNS[name.upper()] for name in BY_LAYER]  #: columns that rows per request and layer have
ASSIGNMENTS_KEPT, MASS, MASS_KEPT = (_COLUMNS[name] for name in ("ASSIGNMENTS_KEPT", "MASS", "MASS_KEPT"))
STEPS, COMPLETE_STEPS = _COLUMNS["STEPS"], _COLUMNS["COMPLETE_STEPS"]

#: Columns of a request's times.
START, FIRST, DECODE, PASSES, END, TOKENS, DECODED = range(7)
TIMES = 7
NO_FIRST = -1  #: the request has no prompt
NO_ROW = -1


def __getattr__(name: str) -> int:
    """Return the column of a counter by its name in capitals, as declared in `results.counters`."""
    if name not in _COLUMNS:
        raise AttributeError(f"unknown counter {name.lower()!r}")
    return _COLUMNS[name]


@fast
def page_of(s, layer):
    """Return the position of a layer's counters, in the current pass's phase."""
    return (layer * 2 + s.now["phase"]) * WIDTH


@fast
def count_at(s, page, counter, amount):
    """Add to a counter of a page: after a write, finding the page anew takes five instructions."""
    s.cells[page + counter] += amount


@fast
def count(s, counter, layer, amount):
    """Add to a counter of a layer, in the current pass's phase."""
    count_at(s, page_of(s, layer), counter, amount)


@fast
def count_here(s, counter, amount):
    """Add to a counter of the current layer."""
    s.cells[s["counters"]["page"] + counter] += amount


@fast
def count_step(s, misses):
    """Count the current step if it demands an expert, and as complete if it had no miss."""
    demands = 1 if s["demand"]["demanded"] > 0 else 0
    count_here(s, STEPS, demands)
    count_here(s, COMPLETE_STEPS, demands if misses == 0 else 0)


@fast
def count_for(s, t, counter, layer, amount):
    """Add to a counter of a layer for the t-th row of the pass, unless it is a rejected draft."""
    if s["batched"] == 0:
        count(s, counter, layer, amount)
    elif s.row_draft[row_at(s, t)] != REJECTED:
        count_apart(s, row_at(s, t), counter, layer, amount)


@fast
def count_row_kept(s, row, layer, assigned, mass):
    """Charge a row's own request and phase with assignments and weight that ran as routed, as `count_apart` does."""
    own, page = s.rows[s.row_number[row]], (layer * 2 + s.row_phase[row]) * WIDTH
    charge(s, own, page, ASSIGNMENTS_KEPT, assigned)
    charge(s, own, page, MASS, mass)
    charge(s, own, page, MASS_KEPT, mass)


@fast
def count_apart(s, row, counter, layer, amount):
    """Charge a row's own request and phase, and exclude the amount from the difference of the current request."""
    charge(s, s.rows[s.row_number[row]], (layer * 2 + s.row_phase[row]) * WIDTH, counter, amount)


@fast
def charge(s, own, page, counter, amount):
    """Add to a counter of a page and to the `own` one of a request, but not to the current request's difference."""
    s.cells[page + counter] += amount
    own[counter] += amount
    s.before[counter] += amount


@fast
def lived(s, layer, steps):
    """Count the lifetime of an evicted copy, in steps."""
    s.lifetimes[(layer * 2 + s.now["phase"]) * BUCKETS + min(bit_length(steps), BUCKETS - 1)] += 1


@called
def begin_pass(s, index, tokens):
    """Charge the request of this pass from here on. A request begins with its first row."""
    number = s.pass_number[index]
    if number != s["counters"]["row"]:
        close_row(s)
        s["counters"]["row"] = number
    if s["batched"] == 0:
        begin_part(s, number, s.pass_phase[index], tokens)
    else:
        for t in range(tokens):
            begin_row(s, row_at(s, t))


@fast
def begin_row(s, row):
    """Begin a row of a pass of several requests, or with drafts."""
    if s.row_draft[row] != REJECTED:
        begin_part(s, s.row_number[row], s.row_phase[row], 1)
    if s.row_draft[row] != KNOWN:
        count_apart(s, row, DRAFT_ROWS, 0, 1)
        count_apart(s, row, DRAFT_REJECTED, 0, 1 if s.row_draft[row] == REJECTED else 0)


@fast
def begin_part(s, number, phase, tokens):
    """Begin `tokens` kept rows of a request."""
    times = s.row_times
    if times[number, TOKENS] == 0:
        times[number, START], times[number, FIRST] = s["clock"]["time"], NO_FIRST
    times[number, TOKENS] += tokens
    if phase == 1:
        times[number, DECODED] += tokens


@called
def end_pass(s, began):
    """Add the pass to TTFT or TPOT of every request in it; `began`: its start, ns."""
    if s["batched"] == 0:
        end_part(s, s["counters"]["row"], s.now["phase"], began)
    else:
        for t in range(s.now["tokens"]):
            if s.row_opens[row_at(s, t)] == 1:
                end_part(s, s.row_number[row_at(s, t)], s.row_phase[row_at(s, t)], began)


@fast
def end_part(s, number, phase, began):
    """Add the pass to TTFT or TPOT of one request."""
    times, time = s.row_times, s["clock"]["time"]
    times[number, END] = time
    if phase == 0:
        times[number, FIRST] = time - times[number, START]
    else:
        times[number, DECODE] += time - began
        times[number, PASSES] += 1


@called
def close_row(s):
    """Charge all counts since the last call to the current request."""
    for counter in range(WIDTH):
        total = 0
        for cell in range(counter, s["n_cells"], WIDTH):
            total += s.cells[cell]
        if s["counters"]["row"] != NO_ROW:
            s.rows[s["counters"]["row"], counter] += total - s.before[counter]
        s.before[counter] = total
    if s["n_layered"] > 0:
        close_layers(s)


@fast
def close_layers(s):
    """Charge what each layer and phase has counted since the last call to the current request."""
    row, at = s["counters"]["row"], 0
    for page in range(0, s["n_cells"], WIDTH):
        for each in range(s["n_layered"]):
            counted = s.cells[page + s.layered[each]]
            if row != NO_ROW:
                s.layer_rows[row, at] += counted - s.layer_before[at]
            s.layer_before[at] = counted
            at += 1


# the event log: numbers in the kernel, names for readers

EVENT_KINDS = (
    "dense", "expert", "cpu", "transfer", "hits", "late", "compulsory", "collisions", "capacity", "evict", "promote",
    "cancel", "drop", "reset", "fill", "load", "stage",
)  # fmt: skip
(
    IS_DENSE, IS_EXPERT, IS_CPU, IS_TRANSFER, IS_HIT, IS_LATE, IS_COMPULSORY, IS_COLLISION, IS_CAPACITY, IS_EVICT,
    IS_PROMOTE, IS_CANCEL, IS_DROP, IS_RESET, IS_FILL, IS_LOAD, IS_STAGE,
) = range(len(EVENT_KINDS))  # fmt: skip
#: A cause is negative, or the copy whose transfer evicts another.
CAUSES = ("", "compute", "miss", "demand", "prefetch", "streamed", "gate", "reset", "cpu")
BY_COMPUTE, BY_MISS, BY_DEMAND, BY_PREFETCH, BY_STREAM, BY_GATE, BY_RESET, BY_CPU = range(-1, -len(CAUSES), -1)


@fast
def note(s, kind, y, cause):
    """Log an instantaneous event."""
    span(s, kind, y, 0, 0, cause)


@fast
def span(s, kind, y, after, spent, cause):
    """Log an activity that starts in `after` ns and takes `spent` ns."""
    if s["logs"] == 1:
        begin = s["clock"]["time"] + after
        write(s, kind, y, begin, begin + spent, cause)


@called
def write(s, kind, y, begin, end, cause):
    """Append a line if there is room. Lines are counted in any case, so that a second run has room for all."""
    at = s["log"]["lines"]
    s["log"]["lines"] = at + 1
    if at >= s["n_log"]:
        return
    line = s.log[at]
    line["t0"], line["t1"], line["kind"], line["cause"] = begin, end, kind, cause
    line["pass"], line["layer"], line["expert"], line["precision"] = s.now["pass"], s.now["layer"], NO_COPY, 0
    if y != NO_COPY:
        x, layer = expert_of(s, y), layer_of(s, y)
        line["layer"], line["expert"], line["precision"] = layer, x - layer * s["experts"], y - x * s["precisions"]
