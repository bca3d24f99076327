"""The program counter of compute: its states, and how an action makes compute continue or stay busy."""

from __future__ import annotations

from moereplay.simulator.compiled.clock import busy
from moereplay.simulator.jit.marks import fast

#: States of the program counter.
STEP, GATE, LOOK, SUGGEST, SHARE, LOAD, LOADED, BEGIN, PRELOAD, PRELOADED, TURN, RAN, CLOSE, OVER = range(14)


@fast
def go_to(s, state):
    s["compute"]["program_counter"] = state


@fast
def busy_until(s, spent, state):
    """Keep compute busy for `spent` ns, then continue in `state`."""
    busy(s, spent)
    go_to(s, state)


@fast
def suggest_if(s, due, then):
    """Continue in `then`, by way of the prefetch policy if there is one and it is due."""
    if due and s["has_suggest"] == 1:
        s["compute"]["then"] = then
        go_to(s, SUGGEST)
    else:
        go_to(s, then)


@fast
def is_over(s):
    """Return whether every pass has been computed."""
    return s["compute"]["program_counter"] == OVER


@fast
def is_idle(s):
    """Return whether compute has waited for a request: the next pass begins now."""
    return s["compute"]["program_counter"] == STEP


@fast
def work_on(s, turn):
    """Set the access that compute loads or runs."""
    s["compute"]["running"] = turn


@fast
def begin_spending(s):
    """Set compute's busy time in this step to 0."""
    s["compute"]["spent"] = 0


@fast
def spend(s, spent):
    """Add to compute's busy time in this step, ns."""
    s["compute"]["spent"] += spent
