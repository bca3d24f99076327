"""The general kernel: the loop over events, in which compute, CPU and link take turns."""

from __future__ import annotations

from typing import Any

from simulator.compiled.clock import OF_CPU, OF_LINK, OF_NOTHING, go_on, link_is_woken, next_event, resume
from simulator.compiled.compute import is_over, run_compute
from simulator.compiled.counters import close_row
from simulator.compiled.link import complete, next_landing, start_transfers
from simulator.compiled.reset import count_unused, warm_up
from simulator.compiled.runtime.errors import NO_ERROR, STUCK, fail
from simulator.compiled.runtime.jit import fast
from simulator.compiled.runtime.state import BoundHooks


def kernel(
    s: Any,
    choose: Any,
    suggest: Any,
    want: Any,
    resolve: Any,
    substitute: Any,
    keys: Any,
    victim: Any,
    admit: Any,
    gate_routing: Any,
    gate_prefetch: Any,
    gate_eviction: Any,
    gate_miss: Any,
    use_routing: Any,
    use_prefetch: Any,
    use_eviction: Any,
    use_miss: Any,
    insert_routing: Any,
    insert_prefetch: Any,
    insert_eviction: Any,
    insert_miss: Any,
    evict_routing: Any,
    evict_prefetch: Any,
    evict_eviction: Any,
    evict_miss: Any,
    predict_routing: Any,
    predict_prefetch: Any,
    predict_eviction: Any,
    predict_miss: Any,
) -> None:
    """Replay to the end. `engine` compiles it, once for all policies: pointers to their hooks come one by one."""
    hooks = BoundHooks(
        choose,
        suggest,
        want,
        resolve,
        substitute,
        keys,
        victim,
        admit,
        gate_routing,
        gate_prefetch,
        gate_eviction,
        gate_miss,
        use_routing,
        use_prefetch,
        use_eviction,
        use_miss,
        insert_routing,
        insert_prefetch,
        insert_eviction,
        insert_miss,
        evict_routing,
        evict_prefetch,
        evict_eviction,
        evict_miss,
        predict_routing,
        predict_prefetch,
        predict_eviction,
        predict_miss,
    )
    replay(s, hooks)


@fast
def replay(s, hooks):
    """The loop over events, from the start to the end of a run."""
    warm_up(s, hooks)
    go_on(s)
    while s["errors"]["error"] == NO_ERROR:
        if s["clock"]["go"] == 1:
            run_compute(s, hooks)
        if link_is_woken(s):
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
    abandoned = s["link"]["flight_end"]
    while (
        s["errors"]["error"] == NO_ERROR
        and s["link"]["flight_first"] < abandoned
        and next_landing(s) <= s["clock"]["time"]
    ):
        complete(s, hooks)
        start_transfers(s, hooks)
