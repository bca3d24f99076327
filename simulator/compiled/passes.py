"""Passes of requests that arrive over time; and start, reset and end of a run.

The rows of each pass are decided when the pass before it has ended. A share is what a request gives to one pass: its
prompt or a piece of it, or a token. Shares are inputs; a pass is made of the next share of every occupied slot, and is
written where the passes of other runs are inputs.
"""

from __future__ import annotations

from moereplay.policies.contract import RESIDENT
from moereplay.simulator.compiled.cache import clear_cache, keep_for_good, warm_copy
from moereplay.simulator.compiled.clock import OVER, STEP, busy_until, go_to, stop
from moereplay.simulator.compiled.counters import BY_RESET, BYTES_UNUSED_AT_END, IS_RESET, count, note
from moereplay.simulator.compiled.link import clear_links, warm_lower
from moereplay.simulator.compiled.links import forget_predictions
from moereplay.simulator.compiled.ranking import clear_ranking, clear_uses
from moereplay.simulator.compiled.state import (
    layer_of,
    notifier,
    own_eviction,
    own_miss,
    own_prefetch,
    own_routing,
    size_of,
)
from moereplay.simulator.interface import NO_COPY
from moereplay.simulator.jit.marks import called, fast
from moereplay.traces.drafts import KNOWN


@called
def next_pass_begins(s):
    """Make the next pass. If no request is there, let compute idle until one is, or end the run; return False."""
    take_arrived_requests(s)
    if make_pass(s):
        return True
    coming, time = s["arrivals"]["coming"], s["clock"]["time"]
    if coming < s["n_rows"]:
        busy_until(s, s.arrival_ns[coming] - time, STEP)
    else:
        go_to(s, OVER)
        stop(s)
    return False


@called
def take_arrived_requests(s):
    """Let requests that are there take free slots, in their order, the lowest slot first."""
    for slot in range(s["n_slots"]):
        coming = s["arrivals"]["coming"]
        is_free = s.slot_next[slot] == s.slot_end[slot]
        if is_free and coming < s["n_rows"] and s.arrival_ns[coming] <= s["clock"]["time"]:
            s.slot_number[slot] = coming
            s.slot_next[slot], s.slot_end[slot] = s.first_share[coming], s.first_share[coming + 1]
            s["arrivals"]["coming"] = coming + 1


@called
def make_pass(s):
    """Make a pass of the next share of every occupied slot; return False if all are free."""
    arrivals, index = s["arrivals"], s["compute"]["index"]
    first = arrivals["rows"]
    arrivals["apart"], arrivals["context"], arrivals["drafts"] = 1, 0, 0
    for slot in range(s["n_slots"]):
        if s.slot_next[slot] < s.slot_end[slot]:
            add_share(s, s.slot_number[slot], s.slot_next[slot])
            s.slot_next[slot] += 1
    if arrivals["rows"] == first:
        return False
    number = s.plan_row_number[first]
    s.plan_pass_start[index], s.plan_pass_tokens[index] = first, arrivals["rows"] - first
    s.plan_pass_phase[index], s.plan_pass_number[index] = s.plan_row_phase[first], number
    s.plan_pass_request[index], s.plan_pass_apart[index] = s.requests[number], arrivals["apart"]
    s.plan_pass_drafts[index] = arrivals["drafts"]
    s.plan_pass_position[index] = s.plan_row_token[first] - first_token(s, number)
    return True


@called
def add_share(s, number, share):
    """Add the rows of a share to a pass; a request whose share is not its first was in the pass before."""
    begin, end, at = s.share_start[share], s.share_start[share + 1], s["arrivals"]["rows"]
    for row in range(begin, end):
        s.plan_row_token[at], s.plan_row_number[at] = s.share_token[row], number
        s.plan_row_reads[at], s.plan_row_draft[at] = s.share_reads[row], s.share_draft[row]
        s.plan_row_phase[at], s.plan_row_opens[at] = s.share_phase[row], 1 if row == begin else 0
        s["arrivals"]["drafts"] += 1 if s.share_draft[row] != KNOWN else 0
        at += 1
    s["arrivals"]["rows"] = at
    s["arrivals"]["context"] += s.share_token[end - 1] - first_token(s, number) + 1
    if share != s.first_share[number]:
        s["arrivals"]["apart"] = 0


@fast
def first_token(s, number):
    """Return a request's first token."""
    return s.share_token[s.share_start[s.first_share[number]]]


on_insert = notifier("on_insert")


# Start, reset and end of a run: initial residents, cleared history, and prefetches that were never used.


@called
def warm_up(s, hooks):
    """Make the initial residents resident."""
    keep_for_good(s)
    for i in range(s["n_warm"]):
        y = s.warm[i]
        warm_copy(s, y)
        if s["listeners_on_insert"] != 0:
            on_insert(s, hooks, y, 0)
    for i in range(s["n_warm_lower"]):
        warm_lower(s, s.warm_tier[i], s.warm_lower[i])


@called
def reset_if_due(s, index):
    """Reset before pass `index` if the configuration requires it."""
    if is_due(s, index):
        note(s, IS_RESET, NO_COPY, BY_RESET)
        s["reset"]["tokens"], s["reset"]["passes"] = 0, 0
        reset(s)
    elif index > 0:
        s["reset"]["passes"] += 1
    s["reset"]["tokens"] += s.pass_tokens[index]


@called
def is_due(s, index):
    """Return whether a reset precedes this pass: never, when no request continues, or after a number of tokens."""
    if index == 0 or s["reset_every"] == 0:
        return False
    if s["reset_every"] < 0:
        return s.pass_apart[index] == 1
    return s["reset"]["tokens"] >= s["reset_every"]


@called
def reset(s):
    """Clear residency, policy memory, history and queues, and abandon transfers."""
    clear_uses(s)
    clear_cache(s)
    clear_ranking(s)
    clear_links(s)
    keep_for_good(s)
    if s["next_pass"] == 1:
        forget_predictions(s, 0, s["n_experts"])
    clear_memory(own_routing(s))
    clear_memory(own_prefetch(s))
    clear_memory(own_eviction(s))
    clear_memory(own_miss(s))


@called
def clear_memory(own):
    """Clear a policy's memory but not its parameters."""
    own.rows[:] = 0
    own.regs[:] = 0
    own.reals[:] = 0.0


@called
def count_unused(s):
    """Count the bytes of prefetched copies that are still unused."""
    for y in range(s["n_copies"]):
        if s.copies[y]["state"] == RESIDENT and s.copies[y]["prefetched"] == 1:
            count(s, BYTES_UNUSED_AT_END, layer_of(s, y), size_of(s, y))
