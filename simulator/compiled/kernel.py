"""The general kernel: the loop over events, in which compute, CPU and link take turns."""

from __future__ import annotations

from typing import Any

from moereplay.simulator.compiled.clock import OF_CPU, OF_LINK, OF_NOTHING, go_on, links_are_woken, next_event, resume
from moereplay.simulator.compiled.compute import is_over, run_compute
from moereplay.simulator.compiled.counters import close_row
from moereplay.simulator.compiled.errors import NO_ERROR, STUCK, fail
from moereplay.simulator.compiled.link import close_links
from moereplay.simulator.compiled.links import complete, next_landing, start_transfers
from moereplay.simulator.compiled.reset import count_unused, warm_up
from moereplay.simulator.jit.marks import fast


def kernel(s: Any, hooks: Any) -> None:
    """Replay to the end. `engine` compiles it, once for all policies: `hooks` are pointers, see `hooks.py`."""
    replay(s, hooks)


def priced_kernel(s: Any, hooks: Any) -> None:
    """The same for machines that `variants.is_plain` is not true of: with lower tiers, or prices of their own."""
    replay(s, hooks)


@fast
def replay(s, hooks):
    """The loop over events, from the start to the end of a run."""
    warm_up(s, hooks)
    go_on(s)
    while s["errors"]["error"] == NO_ERROR:
        if s["clock"]["go"] == 1:
            run_compute(s, hooks)
        if links_are_woken(s):
            start_transfers(s, hooks)
        if s["clock"]["go"] == 1:
            continue
        if is_over(s):
            break
        event = next_event(s, next_landing(s))
        if event == OF_LINK:
            complete(s, hooks)
        elif event == OF_CPU:
            resume(s)
        elif event == OF_NOTHING:
            fail(s, STUCK, 0)
    land_the_last(s, hooks)
    count_unused(s)
    close_row(s)


@fast
def land_the_last(s, hooks):
    """What lands in the nanosecond of the end still does, but for what is issued then."""
    close_links(s)
    while s["errors"]["error"] == NO_ERROR and next_landing(s) <= s["clock"]["time"]:
        complete(s, hooks)
        start_transfers(s, hooks)
