"""The gate: one indivisible event that routes, classifies the demand, handles misses and prefetches."""

from __future__ import annotations

from moereplay.policies import contract
from moereplay.policies.contract import CPU, DROP, IN_FLIGHT, NONE, PER_TOKEN, RESIDENT
from moereplay.simulator.compiled.cache import find, free_bytes, pin, promote, reason, use, use_elsewhere
from moereplay.simulator.compiled.counters import (
    ACCESSES,
    BY_GATE,
    COLLISIONS,
    COMPULSORY,
    CPU_EXECUTED,
    HITS,
    IS_CAPACITY,
    IS_COLLISION,
    IS_COMPULSORY,
    IS_HIT,
    IS_LATE,
    LATE,
    LOW_PRECISION,
    MISSES,
    PREFETCH_HITS,
    PREFETCH_USED,
    count,
    count_here,
    note,
)
from moereplay.simulator.compiled.demand import (
    add_stand_ins,
    clear_substitutes,
    count_assignments,
    drop,
    mark_if_resident,
    rebuild_union,
    route,
    substitute,
)
from moereplay.simulator.compiled.link import await_transfer
from moereplay.simulator.compiled.links import announce, cancel, count_predicted, fetch, prefetches_wait
from moereplay.simulator.compiled.ranking import clear_needed, invalidate_expert, mark_needed, update_next_use
from moereplay.simulator.compiled.state import (
    BAD_VERDICT,
    BAD_WANT,
    DELAYED,
    DROPPED,
    FETCH,
    HIT,
    ON_CPU,
    REPLACED,
    fail,
    notifier,
    runs,
    runs_here,
    waits,
)
from moereplay.simulator.jit.marks import called, fast

on_gate = notifier("on_gate")

# routing


@fast
def open_gate(s, hooks):
    """Route the tokens, take the union of their demand, and cancel overtaken prefetches."""
    s["gate"]["served"], s["gate"]["missed"] = 0, 0
    clear_substitutes(s)
    if s["precisions"] > 1:
        for e in range(s["experts"]):
            s.tier[e] = NONE
    route(s, hooks)
    cancel_overtaken(s)
    take_demand(s)
    if s["reads_unfetched"] == 1:
        for n in range(s["demand"]["demanded"]):
            s.unfetched[n] = 0
    if s["listeners_on_gate"] != 0:
        on_gate(s, hooks)
    if s["keys_read_gate"] == 1:  # the eviction policy's `on_gate` has read the demand
        for x in range(s.now["layer"] * s["experts"], (s.now["layer"] + 1) * s["experts"]):
            invalidate_expert(s, x)
    if s["has_want"] == 1:
        choose_precisions(s, hooks.want)


@fast
def cancel_overtaken(s):
    """Cancel prefetches for this step that have not started."""
    if prefetches_wait(s):
        cancel(s, s.now["step"])


@called
def choose_precisions(s, hook):
    """Call the miss policy for the precision of every demanded expert."""
    hook(s)
    for n in range(s["demand"]["demanded"]):
        if not 0 <= s.wants[n] < s["precisions"]:
            fail(s, BAD_WANT, s.wants[n])
            return


@called
def take_demand(s):
    """Count the demand, and the part of it that a prefetch policy predicted."""
    for n in range(s["demand"]["demanded"]):
        x = s.demand_expert[n]
        mark_needed(s, x, s.demand_sum[n])
        if s["keys_read_demand"] == 1:
            invalidate_expert(s, x)
    count_predicted(s)
    count_here(s, ACCESSES, s["demand"]["demanded"])
    count_assignments(s)


# look-up and misses


@fast
def look_up(s, hooks, first, last):
    """Classify demanded experts [first, last) now; the miss policy decides on those that are absent."""
    absent = 0
    for n in range(first, last):
        classify(s, s.accesses[n - first], n)
        if s.accesses[n - first]["served"] == FETCH:
            s.missing[absent] = n
            absent += 1
    s["gate"]["served"] = last - first
    s["gate"]["missed"] += absent
    if absent > 0 and s["has_resolve"] == 1:
        resolve(s, hooks, first, absent)
    count_absent(s, absent)
    if s["knows_future"] == 1:
        for n in range(first, last):
            update_next_use(s, s.demand_expert[n], n)
            if s["keys_read_future"] == 1:
                invalidate_expert(s, s.demand_expert[n])
    if s["substitution"]["substituted"] == 1:
        serve_substitutes(s)


@called
def serve_substitutes(s):
    """Serve the experts that substitute for those that were looked up."""
    if s["sequential"] == 1:
        s["gate"]["served"] = add_stand_ins(s, s["gate"]["served"])
        return
    s["gate"]["served"] = rebuild_union(s, s["gate"]["served"])
    for i in range(s["gate"]["served"]):
        s.accesses[i] = s.others[i]


@called
def classify(s, access, n):
    """Classify an access as a hit, a delayed hit, or a miss with its reason."""
    x, want, layer = s.demand_expert[n], s.wants[n], s.now["layer"]
    access["n"], access["x"], access["tokens"] = n, x, s.demand_tokens[n]
    y = find(s, x, want, RESIDENT)
    if y != NONE:
        access["y"], access["served"] = y, HIT
        count(s, HITS, layer, 1)
        note(s, IS_HIT, y, BY_GATE)
        count_prefetch_hit(s, y)
        return
    y = find(s, x, want, IN_FLIGHT)
    if y != NONE:
        access["y"], access["served"] = y, DELAYED
        count(s, LATE, layer, 1)
        note(s, IS_LATE, y, BY_GATE)
        await_transfer(s, y)
        return
    access["y"], access["served"] = x * s["precisions"] + want, FETCH
    why = reason(s, x, want)
    count(s, MISSES, layer, 1)
    count(s, why, layer, 1)
    line = IS_COLLISION if why == COLLISIONS else IS_CAPACITY
    note(s, IS_COMPULSORY if why == COMPULSORY else line, access["y"], BY_GATE)


@fast
def count_prefetch_hit(s, y):
    """Count a hit on a prefetched copy that was not used before."""
    if s.copies[y]["prefetched"] == 1:
        count_here(s, PREFETCH_HITS, 1)
        count_here(s, PREFETCH_USED, 1)


@called
def count_absent(s, absent):
    """Publish to policies how many of the looked-up experts are absent and run nevertheless."""
    total = max(s.now["absent"], 0)
    if absent > 0:
        for i in range(s["gate"]["served"]):
            served = s.accesses[i]["served"]
            total += 1 if served == FETCH or served == ON_CPU else 0
    set_absent(s, total)


@fast
def set_absent(s, total):
    s.now["absent"] = total


@fast
def resolve(s, hooks, first, absent):
    """Call the miss policy for all absent experts, then apply its verdicts in demand order."""
    for m in range(absent):
        s.verdict[m] = 0
    hooks.resolve(s, absent, free_bytes(s, s.accesses[s.missing[0] - first]["y"]))
    if s["has_substitute"] == 1:
        for e in range(s["experts"]):  # a verdict changes no copy
            mark_if_resident(s, e)
    for m in range(absent):
        apply_verdict(s, hooks, s.accesses[s.missing[m] - first], s.verdict[m])


@fast
def apply_verdict(s, hooks, access, decided):
    if decided == DROP:
        drop(s, access)
    elif decided == PER_TOKEN:
        substitute(s, hooks.substitute, access)
    elif decided == CPU:
        access["served"], access["y"] = ON_CPU, access["x"] * s["precisions"]
        count(s, CPU_EXECUTED, s.now["layer"], 1)
    elif 0 <= decided <= s.wants[access["n"]]:
        access["y"] = access["x"] * s["precisions"] + decided
    else:
        fail(s, BAD_VERDICT, decided)
    if s["reads_unfetched"] == 1:
        note_unfetched(s, access)


@called
def note_unfetched(s, access):
    """Tell policies what became of a miss that is not fetched."""
    if access["served"] == ON_CPU:
        s.unfetched[access["n"]] = contract.ON_CPU
    elif access["served"] == DROPPED:
        s.unfetched[access["n"]] = contract.DROPPED
    elif access["served"] == REPLACED:
        s.unfetched[access["n"]] = contract.REPLACED


# use


@fast
def use_all(s, hooks):
    """Use and pin experts in the fast tier and queue the absent ones; return how many wait for a transfer."""
    base, coming = s.now["layer"] * s["experts"], 0
    for i in range(s["gate"]["served"]):
        access = s.accesses[i]
        serve_by(s, access["x"] - base, i)
        if s["precisions"] > 1 and runs(access["served"]):
            s.tier[access["x"] - base] = access["y"] - access["x"] * s["precisions"]
        use_one(s, hooks, access)
    for i in range(s["gate"]["served"]):
        access = s.accesses[i]
        if waits(access["served"]):
            coming += 1
        if access["served"] == FETCH and s["has_loading"] == 1:
            announce(s, access["y"])
        elif access["served"] == FETCH:
            fetch(s, access["y"])
        elif access["served"] == HIT and s.owned[access["y"]]["side"] == 1:
            promote(s, hooks, access["y"])
    return coming


@fast
def serve_by(s, e, i):
    """Note that the i-th access serves expert e of this layer."""
    s.slot[e] = i


@fast
def use_one(s, hooks, access):
    """Use what runs, and pin it if that is from the fast tier; clear the need for any other."""
    if not runs_here(access["served"]):
        if access["served"] == ON_CPU:
            use_elsewhere(s, hooks, access["y"])
        clear_needed(s, access["x"])
        return
    if access["n"] == NONE:
        mark_needed(s, access["x"], 0)  # a substitute; demanded experts are already marked
    use(s, hooks, access["y"])
    pin(s, access["y"])
    if access["y"] != access["x"] * s["precisions"]:
        count(s, LOW_PRECISION, s.now["layer"], 1)
