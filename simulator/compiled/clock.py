"""The loop over events: (time, phase, issue number), with LINK before CPU before COMPUTE.

No queue of events is needed: transfers land in the order of their issue, and CPU and compute have one event each.
"""

from __future__ import annotations

from typing import Any

from simulator.compiled.compute import OVER, go_on
from simulator.compiled.counters import close_row
from simulator.compiled.link import complete, next_landing, ring, wake
from simulator.compiled.reset import count_unused, warm_up
from simulator.compiled.runtime.state import NO_ERROR, NOT_SOON, STUCK, BoundHooks


def kernel(
    w: Any,
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
    """Replay the world. `engine` compiles it, once for all policies: pointers to their hooks come one by one."""
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
    warm_up(w, hooks)
    w["go"] = 1
    abandoned = -1
    while w["error"] == NO_ERROR:
        # compute goes on as far as it can without an event
        if w["go"] == 1:
            go_on(w, hooks)
        # the link starts what it can
        if w["wake"] == 1:
            w["wake"] = 0
            wake(w, hooks)
        if w["go"] == 1:
            continue
        # the end: what lands in this very nanosecond still does, but for what is issued now
        lands = next_landing(w)
        if w["place"] == OVER:
            abandoned = w["flight_end"] if abandoned < 0 else abandoned
            if w["flight_first"] >= abandoned or lands > w["time"]:
                break
        # the next event
        if lands <= w["cpu_at"] and lands <= w["compute_at"] and lands < NOT_SOON:
            w["time"] = lands
            complete(w, hooks)
            w["wake"] = 1
        elif w["cpu_at"] <= w["compute_at"] and w["cpu_at"] < NOT_SOON:
            w["time"], w["cpu_at"], w["beside_cpu"] = w["cpu_at"], NOT_SOON, 0
            ring(w)
        elif w["compute_at"] < NOT_SOON:
            w["time"], w["compute_at"] = w["compute_at"], NOT_SOON
            w["go"] = 1
        else:
            w["error"] = STUCK
    count_unused(w)
    close_row(w)
