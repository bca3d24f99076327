"""The gate: one indivisible event in which routing, classification, miss handling and prefetching are decided."""

from __future__ import annotations

from moereplay.policies.contract import CPU, DROP, IN_FLIGHT, NONE, PER_TOKEN, QUEUED, RESIDENT
from moereplay.simulator.compiled import listeners
from moereplay.simulator.compiled.cache import find, free_bytes, pin, reason, use
from moereplay.simulator.compiled.counters import (
    ACCESSES,
    COLLISIONS,
    COMPULSORY,
    CPU_EXECUTED,
    HITS,
    LATE,
    LOW_PRECISION,
    MISSES,
    PREDICTABLE,
    PREDICTED,
    PREDICTED_DEMANDED,
    PREFETCH_HITS,
    PREFETCH_USED,
    count,
    count_here,
)
from moereplay.simulator.compiled.demand import route
from moereplay.simulator.compiled.errors import BAD_NAME, BAD_VERDICT, BAD_WANT, fail
from moereplay.simulator.compiled.fidelity import count_assignments
from moereplay.simulator.compiled.link import announce, meet
from moereplay.simulator.compiled.links import cancel, fetch, prefetch, prefetches_wait
from moereplay.simulator.compiled.log import BY_GATE, IS_CAPACITY, IS_COLLISION, IS_COMPULSORY, IS_HIT, IS_LATE, note
from moereplay.simulator.compiled.ranking import invalidate_expert
from moereplay.simulator.compiled.served import DELAYED, FETCH, HAS_RUN, HIT, ON_CPU, runs, runs_here, waits
from moereplay.simulator.compiled.side_buffer import promote
from moereplay.simulator.compiled.state import (
    accesses,
    copies,
    demand_expert,
    demand_sum,
    demand_tokens,
    expert_of,
    layer_of,
    missing,
    named,
    now,
    others,
    owned,
    slot,
    suggested,
    tier,
    verdict,
    wants,
)
from moereplay.simulator.compiled.substitution import add_stand_ins, drop, make_union_again, no_stand_ins, substitute
from moereplay.simulator.compiled.uses import foresee, need, need_no_more, predict
from moereplay.simulator.jit.marks import called, fast

on_gate = listeners.notifier("on_gate")

# routing


@fast
def open_gate(s, hooks):
    """Route the tokens, take the union of their demand, cancel overtaken prefetches."""
    mark_open(s)
    s["gate"]["served"] = 0
    no_stand_ins(s)
    if s["precisions"] > 1:
        clear_tiers(s)
    route(s, hooks)
    cancel_overtaken(s)
    take_demand(s)
    if s["listeners_on_gate"] != 0:
        on_gate(s, hooks)
    if s["keys_read_gate"] == 1:
        invalidate_layer(s)
    if s["has_want"] == 1:
        choose_precisions(s, hooks.want)


@fast
def mark_open(s):
    """The gate is open; how many experts are absent is not known yet."""
    now(s)["gated"], now(s)["absent"] = 1, -1


@fast
def close_gate(s):
    """A step begins: its gate has not opened."""
    now(s)["gated"] = 0


@fast
def cancel_overtaken(s):
    """Prefetches for this step that have not started come too late."""
    if prefetches_wait(s):
        cancel(s, now(s)["step"])


@called
def clear_tiers(s):
    """Nothing runs yet at any precision."""
    for e in range(s["experts"]):
        tier(s)[e] = NONE


@called
def invalidate_layer(s):
    """The eviction policy has counted the demand: keys of this layer may have changed."""
    for x in range(now(s)["layer"] * s["experts"], (now(s)["layer"] + 1) * s["experts"]):
        invalidate_expert(s, x)


@called
def choose_precisions(s, hook):
    """The precision wanted of every demanded expert."""
    hook(s)
    for n in range(s["demand"]["demanded"]):
        if not 0 <= wants(s)[n] < s["precisions"]:
            fail(s, BAD_WANT, wants(s)[n])
            return


@called
def take_demand(s):
    """Count what is demanded, and how much of it a prefetch policy had named."""
    for n in range(s["demand"]["demanded"]):
        x = demand_expert(s)[n]
        need(s, x, demand_sum(s)[n])
        if s["keys_read_demand"] == 1:
            invalidate_expert(s, x)
        count_named(s, x)
    count_here(s, ACCESSES, s["demand"]["demanded"])
    count_assignments(s)


@fast
def count_named(s, x):
    """How often a demanded expert was named since its layer's last gate, of how often it could have been."""
    if s["has_suggest"] == 1:
        count_here(s, PREDICTED_DEMANDED, named(s)[x])
        count_here(s, PREDICTABLE, max(min(now(s)["layer"], s["reach"]), named(s)[x]))


# look-up and misses


@fast
def look_up(s, hooks, first, last):
    """Classify demanded experts [first, last) against this moment; the miss policy decides on those that are absent."""
    absent = 0
    for n in range(first, last):
        classify(s, accesses(s)[n - first], n)
        if accesses(s)[n - first]["served"] == FETCH:
            missing(s)[absent] = n
            absent += 1
    s["gate"]["served"] = last - first
    if absent > 0 and s["has_resolve"] == 1:
        resolve(s, hooks, first, absent)
    count_absent(s, absent)
    if s["knows_future"] == 1:
        for n in range(first, last):
            foresee(s, demand_expert(s)[n], n)
            if s["keys_read_future"] == 1:
                invalidate_expert(s, demand_expert(s)[n])
    if s["substitution"]["substituted"] == 1:
        add_substitutes(s)


@called
def add_substitutes(s):
    """Tokens run other experts than were looked up: those are served too."""
    if s["sequential"] == 1:
        s["gate"]["served"] = add_stand_ins(s, s["gate"]["served"])
        return
    s["gate"]["served"] = make_union_again(s, s["gate"]["served"])
    for i in range(s["gate"]["served"]):
        accesses(s)[i] = others(s)[i]


@called
def classify(s, access, n):
    """Hit, late, or missing for a reason."""
    x, want, layer = demand_expert(s)[n], wants(s)[n], now(s)["layer"]
    access["n"], access["x"], access["tokens"] = n, x, demand_tokens(s)[n]
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
        meet(s, y)
        return
    access["y"], access["served"] = x * s["precisions"] + want, FETCH
    why = reason(s, x, want)
    count(s, MISSES, layer, 1)
    count(s, why, layer, 1)
    note(s, line_of(why), access["y"], BY_GATE)


@fast
def count_prefetch_hit(s, y):
    """A hit of the layer in progress, of a prefetched copy that had not been used before."""
    if copies(s)[y]["prefetched"] == 1:
        count_here(s, PREFETCH_HITS, 1)
        count_here(s, PREFETCH_USED, 1)


@fast
def line_of(why):
    """The event log's name of a reason."""
    if why == COMPULSORY:
        return IS_COMPULSORY
    return IS_COLLISION if why == COLLISIONS else IS_CAPACITY


@called
def count_absent(s, absent):
    """Tell policies how many of those looked up are absent and run all the same."""
    total = max(now(s)["absent"], 0)
    if absent > 0:
        for i in range(s["gate"]["served"]):
            served = accesses(s)[i]["served"]
            total += 1 if served == FETCH or served == ON_CPU else 0
    tell_absent(s, total)


@fast
def tell_absent(s, total):
    """What policies see of it."""
    now(s)["absent"] = total


@fast
def resolve(s, hooks, first, absent):
    """Call the miss policy for all that is absent, then apply its verdicts in demand order."""
    for m in range(absent):
        verdict(s)[m] = 0
    hooks.resolve(s, absent, free_bytes(s, accesses(s)[missing(s)[0] - first]["y"]))
    for m in range(absent):
        obey(s, hooks, accesses(s)[missing(s)[m] - first], verdict(s)[m])


@fast
def obey(s, hooks, access, decided):
    """One verdict."""
    if decided == DROP:
        drop(s, access)
    elif decided == PER_TOKEN:
        substitute(s, hooks.substitute, access)
    elif decided == CPU:
        access["served"], access["y"] = ON_CPU, access["x"] * s["precisions"]
        count(s, CPU_EXECUTED, now(s)["layer"], 1)
    elif 0 <= decided <= wants(s)[access["n"]]:
        access["y"] = access["x"] * s["precisions"] + decided
    else:
        fail(s, BAD_VERDICT, decided)


# use


@fast
def use_all(s, hooks):
    """Set timestamps, pin and, where absent, queue what runs from the fast tier; returns how many wait for the link."""
    base, coming = now(s)["layer"] * s["experts"], 0
    for i in range(s["gate"]["served"]):
        access = accesses(s)[i]
        serve_by(s, access["x"], i)
        if s["precisions"] > 1 and runs(access["served"]):
            tier(s)[access["x"] - base] = access["y"] - access["x"] * s["precisions"]
        use_one(s, hooks, access)
    for i in range(s["gate"]["served"]):
        access = accesses(s)[i]
        if waits(access["served"]):
            coming += 1
        if access["served"] == FETCH and s["has_loading"] == 1:
            announce(s, access["y"])
        elif access["served"] == FETCH:
            fetch(s, access["y"])
        elif access["served"] == HIT and owned(s)[access["y"]]["side"] == 1:
            promote(s, hooks, access["y"])
    return coming


@fast
def serve_by(s, x, i):
    """The i-th access serves expert x of this layer."""
    slot(s)[x - now(s)["layer"] * s["experts"]] = i


@fast
def use_one(s, hooks, access):
    """An expert that runs from the fast tier is used and pinned; any other is not needed there."""
    if not runs_here(access["served"]):
        need_no_more(s, access["x"])
        return
    if access["n"] == NONE:
        need(s, access["x"], 0)  # a substitute: the demanded are marked already
    use(s, hooks, access["y"])
    pin(s, access["y"])
    if access["y"] != access["x"] * s["precisions"]:
        count(s, LOW_PRECISION, now(s)["layer"], 1)


@fast
def has_come(s, i):
    """The i-th access is there as a hit is."""
    accesses(s)[i]["served"] = HIT


@fast
def has_had_its_turn(s, i):
    """The i-th access is computed in this round and in no other."""
    accesses(s)[i]["served"] = HAS_RUN


# prefetch


@fast
def suggest(s, hooks):
    """Call the prefetch policy, and queue what is absent."""
    layer = now(s)["layer"]
    for x in range(layer * s["experts"], (layer + 1) * s["experts"]):
        named(s)[x] = 0  # counted at this gate
    for i in range(ask_names(s, hooks.suggest)):
        name(s, hooks, suggested(s)[i])


@fast
def ask_names(s, hook):
    """How many copies the prefetch policy names; none, with an error set, if it names what does not exist."""
    if s["renews"] == 1:  # what it named before and is still queued is named anew, or is not wanted any more
        cancel(s, now(s)["step"] + s["layers"])
    total = hook(s)
    if not 0 <= total <= s["n_copies"]:
        fail(s, BAD_NAME, total)
        return 0
    for i in range(total):
        if not 0 <= suggested(s)[i] < s["n_copies"]:
            fail(s, BAD_NAME, suggested(s)[i])
            return 0
    return total


@fast
def name(s, hooks, y):
    """A prefetch policy names a copy."""
    x, layer = expert_of(s, y), layer_of(s, y)
    precision = y - x * s["precisions"]
    count(s, PREDICTED, layer, 1)
    named(s)[x] += 1
    resident = find(s, x, precision, RESIDENT)
    if resident != NONE:
        predict(s, hooks, resident)
    elif find(s, x, precision, IN_FLIGHT) == NONE and find(s, x, precision, QUEUED) == NONE:
        prefetch(s, y, now(s)["step"] + layer - now(s)["layer"])
