"""The CPU's share of a step: misses that it computes from the tier that it reads, beside links and compute.

It works on one expert at a time, first queued first served. What it has to wait for comes into its tier first.
"""

from __future__ import annotations

from moereplay.simulator.compiled.clock import cpu_busy, cpu_busy_until, cpu_is_busy, resume, wake_links
from moereplay.simulator.compiled.counters import BY_MISS, CPU_ABSENT, CPU_NS, IS_CPU, count, span
from moereplay.simulator.compiled.links import any_link_is_busy, bring_for_cpu, send_up
from moereplay.simulator.compiled.lower_tiers import NO_CPU_WAITS, release, take_arrival
from moereplay.simulator.compiled.state import (
    NO_CPU,
    ON_CPU,
    expert_of,
    fail,
    kind_of,
)
from moereplay.simulator.jit.marks import called, fast


@fast
def bring(s):
    """Hold what is where the CPU reads; queue the rest to come."""
    if s["cpu_tier"] > 0:
        bring_all(s)


@called
def bring_all(s):
    for i in range(s["gate"]["served"]):
        if s.accesses[i]["served"] == ON_CPU and not bring_for_cpu(s, s.accesses[i]["y"]):
            count(s, CPU_ABSENT, s.now["layer"], 1)


@called
def start_cpu(s):
    """Begin with what is there, one after the other, judged once for contention; its times are known at once."""
    contended, after, cpu = any_link_is_busy(s), 0, s["cpu"]
    cpu["first"], cpu["end"], cpu["left"] = 0, 0, 0
    for i in range(s["gate"]["served"]):
        if s.accesses[i]["served"] != ON_CPU:
            continue
        if s["has_cpu"] == 0:
            fail(s, NO_CPU, 0)
            return
        cpu["left"] += 1
        if s["cpu_tier"] == 0 or s.owned[s.accesses[i]["y"]]["for_cpu"] == NO_CPU_WAITS:
            spent = cost_on_cpu(s, i, contended) + synchronise(s)
            begin_work(s, i, after, spent)
            after += spent
            queue_work(s, i, s["clock"]["time"] + after)
    cpu["planned"] = cpu["end"]
    if cpu["end"] > 0:
        cpu_busy_until(s, s.cpu_until[0 if s["cpu_tier"] > 0 else cpu["end"] - 1])


@fast
def cost_on_cpu(s, i, contended):
    """Return what the i-th access takes on the CPU, ns; `contended`: a link works as it begins."""
    size, tokens = s.cost_row[kind_of(s, s.accesses[i]["y"])], s.accesses[i]["tokens"]
    return s.slow_cpu_ns[size, tokens] if contended else s.cpu_ns[size, tokens]


@fast
def synchronise(s):
    """Return what the first work of a step that is queued at its gate takes more, ns."""
    if s["sync_ns"] == 0 or s["cpu"]["synced"] == s.now["step"] + 1:
        return 0
    s["cpu"]["synced"] = s.now["step"] + 1
    return s["sync_ns"]


@fast
def begin_work(s, i, after, spent):
    """Count and log a work that begins in `after` ns."""
    count(s, CPU_NS, s.now["layer"], spent)
    span(s, IS_CPU, s.accesses[i]["y"], after, spent, BY_MISS)


@fast
def queue_work(s, i, until):
    """Queue the work of the i-th access; `until`: its end, ns, if it is known."""
    s.cpu_queue[s["cpu"]["end"]], s.cpu_until[s["cpu"]["end"]] = i, until
    s["cpu"]["end"] += 1


@fast
def cpu_has_work(s):
    """Return whether the CPU has yet to compute an expert of the look-up, one that has to come first among them."""
    return s["cpu"]["left"] > 0 if s["cpu_tier"] > 0 else cpu_is_busy(s)


# with a tier that the CPU reads: an event at the end of each work


@called
def end_work(s):
    """Let a copy go, begin the next work, and wake links and compute."""
    cpu = s["cpu"]
    release(s, s["cpu_tier"] - 1, s.accesses[s.cpu_queue[cpu["first"]]]["y"])
    cpu["first"] += 1
    cpu["left"] -= 1
    if cpu["first"] < cpu["planned"]:
        cpu_busy_until(s, s.cpu_until[cpu["first"]])
    elif cpu["first"] < cpu["end"]:
        begin_next(s)
    wake_links(s)
    if cpu["left"] == 0:
        resume(s)


@called
def begin_next(s):
    """Begin the first queued work, judged for contention as it begins."""
    i = s.cpu_queue[s["cpu"]["first"]]
    spent = cost_on_cpu(s, i, any_link_is_busy(s))
    begin_work(s, i, 0, spent)
    cpu_busy(s, spent)


@called
def work_on_arrival(s):
    """Queue the work on a copy that has come, when the links have been woken; a prefetch may go on from there."""
    y = take_arrival(s)
    queue_work(s, s.slot[expert_of(s, y) - s.now["layer"] * s["experts"]], 0)
    if not cpu_is_busy(s):
        begin_next(s)
    if s["arrival"]["behind"] == 1:
        send_up(s, y, 1)
        wake_links(s)
