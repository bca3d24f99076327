"""Requests that arrive over time: the rows of each pass are decided when the pass before it has ended.

A share is what a request gives to one pass: its prompt or a piece of it, or a token. Shares are inputs; a pass is made
of the next share of every occupied slot, and is written where the passes of other runs are inputs.
"""

from __future__ import annotations

from moereplay.simulator.compiled.clock import stop
from moereplay.simulator.compiled.program import OVER, STEP, busy_until, go_to
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
        if s.slot_next[slot] == s.slot_end[slot] and has_come(s, coming):
            s.slot_number[slot] = coming
            s.slot_next[slot], s.slot_end[slot] = s.first_share[coming], s.first_share[coming + 1]
            s["arrivals"]["coming"] = coming + 1


@fast
def has_come(s, number):
    """Return whether a request exists and has arrived."""
    return number < s["n_rows"] and s.arrival_ns[number] <= s["clock"]["time"]


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
    s.plan_start[index], s.plan_tokens[index] = first, arrivals["rows"] - first
    s.plan_phase[index], s.plan_number[index] = s.plan_row_phase[first], number
    s.plan_request[index], s.plan_apart[index] = s.requests[number], arrivals["apart"]
    s.plan_drafts[index] = arrivals["drafts"]
    s.plan_position[index] = s.plan_token[first] - first_token(s, number)
    return True


@called
def add_share(s, number, share):
    """Add the rows of a share to a pass; a request whose share is not its first was in the pass before."""
    begin, end, at = s.share_start[share], s.share_start[share + 1], s["arrivals"]["rows"]
    for row in range(begin, end):
        s.plan_token[at], s.plan_row_number[at] = s.share_token[row], number
        s.plan_reads[at], s.plan_draft[at] = s.share_reads[row], s.share_draft[row]
        s.plan_row_phase[at], s.plan_opens[at] = s.share_phase[row], 1 if row == begin else 0
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
