"""Requests that arrive over time: the rows of each pass are decided when the pass before it has ended.

A share is what a request gives to one pass: its prompt or a piece of it, or a token. Shares are inputs; a pass is made
of the next share of every occupied slot, and is written where the passes of other runs are inputs.
"""

from __future__ import annotations

from moereplay.simulator.compiled.clock import stop
from moereplay.simulator.compiled.program import OVER, STEP, busy_until, go_to
from moereplay.simulator.compiled.state import (
    arrival_ns,
    first_share,
    plan_apart,
    plan_draft,
    plan_drafts,
    plan_number,
    plan_opens,
    plan_phase,
    plan_position,
    plan_reads,
    plan_request,
    plan_row_number,
    plan_row_phase,
    plan_start,
    plan_token,
    plan_tokens,
    requests,
    share_draft,
    share_phase,
    share_reads,
    share_start,
    share_token,
    slot_end,
    slot_next,
    slot_number,
)
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
        busy_until(s, arrival_ns(s)[coming] - time, STEP)
    else:
        go_to(s, OVER)
        stop(s)
    return False


@called
def take_arrived_requests(s):
    """Let requests that are there take free slots, in their order, the lowest slot first."""
    for slot in range(s["n_slots"]):
        coming = s["arrivals"]["coming"]
        if slot_next(s)[slot] == slot_end(s)[slot] and has_come(s, coming):
            slot_number(s)[slot] = coming
            slot_next(s)[slot], slot_end(s)[slot] = first_share(s)[coming], first_share(s)[coming + 1]
            s["arrivals"]["coming"] = coming + 1


@fast
def has_come(s, number):
    """Return whether a request exists and has arrived."""
    return number < s["n_rows"] and arrival_ns(s)[number] <= s["clock"]["time"]


@called
def make_pass(s):
    """Make a pass of the next share of every occupied slot; return False if all are free."""
    arrivals, index = s["arrivals"], s["compute"]["index"]
    first = arrivals["rows"]
    arrivals["apart"], arrivals["context"], arrivals["drafts"] = 1, 0, 0
    for slot in range(s["n_slots"]):
        if slot_next(s)[slot] < slot_end(s)[slot]:
            add_share(s, slot_number(s)[slot], slot_next(s)[slot])
            slot_next(s)[slot] += 1
    if arrivals["rows"] == first:
        return False
    number = plan_row_number(s)[first]
    plan_start(s)[index], plan_tokens(s)[index] = first, arrivals["rows"] - first
    plan_phase(s)[index], plan_number(s)[index] = plan_row_phase(s)[first], number
    plan_request(s)[index], plan_apart(s)[index] = requests(s)[number], arrivals["apart"]
    plan_drafts(s)[index] = arrivals["drafts"]
    plan_position(s)[index] = plan_token(s)[first] - first_token(s, number)
    return True


@called
def add_share(s, number, share):
    """Add the rows of a share to a pass; a request whose share is not its first was in the pass before."""
    begin, end, at = share_start(s)[share], share_start(s)[share + 1], s["arrivals"]["rows"]
    for row in range(begin, end):
        plan_token(s)[at], plan_row_number(s)[at] = share_token(s)[row], number
        plan_reads(s)[at], plan_draft(s)[at] = share_reads(s)[row], share_draft(s)[row]
        plan_row_phase(s)[at], plan_opens(s)[at] = share_phase(s)[row], 1 if row == begin else 0
        s["arrivals"]["drafts"] += 1 if share_draft(s)[row] != KNOWN else 0
        at += 1
    s["arrivals"]["rows"] = at
    s["arrivals"]["context"] += share_token(s)[end - 1] - first_token(s, number) + 1
    if share != first_share(s)[number]:
        s["arrivals"]["apart"] = 0


@fast
def first_token(s, number):
    """Return a request's first token."""
    return share_token(s)[share_start(s)[first_share(s)[number]]]
