"""The kernel in steps: the caller says when something has ended, and the run goes on until something else must end.

So real threads can do what the engine decides: what has begun is in the log, and nothing is known of when it ends.
"""

from __future__ import annotations

from typing import Any

from moereplay.simulator.compiled.clock import go_on, links_are_woken
from moereplay.simulator.compiled.compute import GATE, RAN, run_compute, spend
from moereplay.simulator.compiled.counters import DENSE_NS, EXPERT_NS, LINK_BUSY_NS, close_row, count, count_here
from moereplay.simulator.compiled.errors import NO_ERROR
from moereplay.simulator.compiled.links import complete, start_transfers
from moereplay.simulator.compiled.reset import count_unused, warm_up
from moereplay.simulator.compiled.state import layer_of, now
from moereplay.simulator.jit.marks import called, fast

#: What the caller says, in `stepped.ended`, beside `clock.time`, and for how long it lasted, in `stepped.elapsed`.
BEGUN, COMPUTED, LANDED, RESUMED, ABANDONED, CLOSED = range(6)


def stepped_kernel(s: Any, hooks: Any) -> None:
    """Take what has ended, and go on. `s` must be of `variants.STEPPED`."""
    take_up(s, hooks)


@fast
def take_up(s, hooks):
    """What has ended: nothing yet, compute's activity, a transfer, a wait, a transfer that counts no more, the run."""
    ended = s["stepped"]["ended"]
    if ended == LANDED:
        land_one(s, hooks)
    elif ended == ABANDONED:
        charge_link(s)
    elif ended == CLOSED:
        count_unused(s)
        close_row(s)
    else:
        if ended == BEGUN:
            warm_up(s, hooks)
        elif ended == COMPUTED:
            charge_compute(s)
        go_on(s)
        until_it_waits(s, hooks)


@fast
def land_one(s, hooks):
    """A transfer is complete. If compute waits for it, it goes on when the caller says RESUMED."""
    charge_link(s)
    complete(s, hooks)
    start_transfers(s, hooks)


@fast
def until_it_waits(s, hooks):
    """Go on until compute waits for what is under way, or the run is over."""
    while s["errors"]["error"] == NO_ERROR and s["clock"]["go"] == 1:
        run_compute(s, hooks)
        if links_are_woken(s):
            start_transfers(s, hooks)


@called
def charge_compute(s):
    """How long compute was busy: with a dense part, or with an expert."""
    elapsed = s["stepped"]["elapsed"]
    if s["compute"]["program_counter"] == RAN:
        spend(s, elapsed)
        count(s, EXPERT_NS, now(s)["layer"], elapsed)
    elif s["compute"]["program_counter"] == GATE:
        count_here(s, DENSE_NS, elapsed)


@called
def charge_link(s):
    """For how long a transfer kept the link."""
    count(s, LINK_BUSY_NS, layer_of(s, s["stepped"]["y"]), s["stepped"]["elapsed"])
