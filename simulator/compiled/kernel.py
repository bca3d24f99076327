"""The general kernel, which runs the event loop, and the stepped kernel, whose caller reports when activities end.

The stepped kernel lets real threads carry out the engine's decisions: activities that begin are in the event log, and
their ends are unknown until the caller reports them.
"""

from __future__ import annotations

from typing import Any

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.clock import (
    GATE,
    OF_CPU,
    OF_LINK,
    OF_NOTHING,
    RAN,
    go_on,
    is_over,
    links_are_woken,
    next_event,
    resume,
)
from moereplay.simulator.compiled.compute import end_work, run_compute, spend, work_on_arrival
from moereplay.simulator.compiled.counters import DENSE_NS, EXPERT_NS, LINK_BUSY_NS, close_row, count, count_here
from moereplay.simulator.compiled.link import close_links
from moereplay.simulator.compiled.links import complete, next_landing, start_transfers
from moereplay.simulator.compiled.passes import count_unused, warm_up
from moereplay.simulator.compiled.state import NO_ERROR, STUCK, fail, layer_of
from moereplay.simulator.jit.marks import called


@called
def kernel(s: Any, hooks: Any) -> None:
    """Replay to the end. `engine` compiles it once for all policies; `hooks` are pointers, see `hooks.py`."""
    warm_up(s, hooks)
    go_on(s)
    while s["errors"]["error"] == NO_ERROR:
        if s["clock"]["go"] == 1:
            run_compute(s, hooks)
        if links_are_woken(s):
            start_transfers(s, hooks)
        if s["cpu_tier"] > 0 and s["arrival"]["y"] != NONE:  # a copy has come where the CPU reads
            work_on_arrival(s)
            continue
        if s["clock"]["go"] == 1:
            continue
        if is_over(s):
            break
        event = next_event(s, next_landing(s))
        if event == OF_LINK:
            complete(s, hooks)
        elif event == OF_CPU and s["cpu_tier"] > 0:
            end_work(s)
        elif event == OF_CPU:  # all works have ended
            resume(s)
        elif event == OF_NOTHING:
            fail(s, STUCK, 0)
    close_links(s)  # land the transfers of the last nanosecond, but none that is issued in it
    while s["errors"]["error"] == NO_ERROR and next_landing(s) <= s["clock"]["time"]:
        complete(s, hooks)
        start_transfers(s, hooks)
    count_unused(s)
    close_row(s)


def priced_kernel(s: Any, hooks: Any) -> None:
    """Replay to the end, with lower tiers or costs beyond tables: where `layout.is_plain` is false."""
    kernel(s, hooks)


# the stepped kernel

#: Reports of the caller in `stepped.ended`, with `clock.time` and the duration in `stepped.elapsed`.
BEGUN, COMPUTED, LANDED, RESUMED, ABANDONED, CLOSED = range(6)


def stepped_kernel(s: Any, hooks: Any) -> None:
    """Process one reported end, and continue until something else must end. The state must be of `layout.STEPPED`."""
    ended = s["stepped"]["ended"]
    if ended == LANDED:
        charge_link(s)
        complete(s, hooks)  # compute that waits for it continues when the caller reports RESUMED
        start_transfers(s, hooks)
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
        while s["errors"]["error"] == NO_ERROR and s["clock"]["go"] == 1:
            run_compute(s, hooks)
            if links_are_woken(s):
                start_transfers(s, hooks)


@called
def charge_compute(s):
    """Count the measured duration of a dense part or an expert."""
    elapsed = s["stepped"]["elapsed"]
    if s["compute"]["program_counter"] == RAN:
        spend(s, elapsed)
        count(s, EXPERT_NS, s.now["layer"], elapsed)
    elif s["compute"]["program_counter"] == GATE:
        count_here(s, DENSE_NS, elapsed)


@called
def charge_link(s):
    """Count how long a transfer occupied the link."""
    count(s, LINK_BUSY_NS, layer_of(s, s["stepped"]["y"]), s["stepped"]["elapsed"])
