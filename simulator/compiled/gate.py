"""The gate: one indivisible event in which routing, classification, miss handling and prefetching are decided."""

from __future__ import annotations

from policies.contract import CPU, DROP, IN_FLIGHT, NONE, PER_TOKEN, QUEUED, RESIDENT
from simulator.compiled import counters
from simulator.compiled.cache import find, free_bytes, predict, protect, reason, use
from simulator.compiled.counters import count
from simulator.compiled.demand import route
from simulator.compiled.link import cancel, fetch, prefetch
from simulator.compiled.log import BY_GATE, IS_CAPACITY, IS_COLLISION, IS_COMPULSORY, IS_HIT, IS_LATE, note
from simulator.compiled.runtime import listeners
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.ranking import touch
from simulator.compiled.runtime.state import (
    BAD_NAME,
    BAD_VERDICT,
    BAD_WANT,
    accesses,
    copies,
    demand_expert,
    demand_next,
    demand_pass,
    demand_sum,
    demand_tokens,
    expert_of,
    experts,
    layer_of,
    missing,
    named,
    now,
    owned,
    slot,
    suggested,
    tier,
    verdict,
    wants,
)
from simulator.compiled.served import FETCH, HIT, LATE, ON_CPU, runs, runs_here, waits
from simulator.compiled.side_buffer import promote
from simulator.compiled.substitution import drop, substitute

# routing


@fast
def open_gate(w, hooks):
    """Route the tokens, unite their demand, cancel overtaken prefetches."""
    now(w)["gated"], now(w)["absent"] = 1, -1
    w["gated_at"], w["spent"] = w["time"], 0
    w["changed"], w["substituted"], w["coming"] = 0, 0, 0
    w["turn"], w["looked_up"], w["served"] = 0, 0, 0
    if w["precisions"] > 1:
        clear_tiers(w)
    route(w, hooks)
    if w["ask_first"] < w["ask_end"]:
        cancel(w, now(w)["step"])
    enter_books(w)
    if w["hears_gate"] != 0:
        listeners.gated(w, hooks)
    if w["minds_gate"] == 1:
        touch_layer(w)
    if w["has_want"] == 1:
        ask_wants(w, hooks.want)


@called
def clear_tiers(w):
    """Nothing runs yet at any precision."""
    for e in range(w["experts"]):
        tier(w)[e] = NONE


@called
def touch_layer(w):
    """The eviction policy has heard of the demand: keys of this layer's copies may be others now."""
    for x in range(now(w)["layer"] * w["experts"], (now(w)["layer"] + 1) * w["experts"]):
        touch(w, x)


@called
def ask_wants(w, hook):
    """The precision wanted of every demanded expert."""
    hook(w)
    for n in range(w["demanded"]):
        if not 0 <= wants(w)[n] < w["precisions"]:
            w["error"], w["culprit"] = BAD_WANT, wants(w)[n]
            return


@called
def enter_books(w):
    """What is demanded, and how much of it a prefetch policy had named."""
    layer, foreseen, predictable = now(w)["layer"], 0, 0
    gates = min(layer, w["reach"])  # that may name this layer
    for n in range(w["demanded"]):
        x = demand_expert(w)[n]
        experts(w)[x]["needed"] = 1
        experts(w)[x]["mass_ever"] += demand_sum(w)[n]
        if w["minds_demand"] == 1:
            touch(w, x)
        foreseen += named(w)[x]
        predictable += max(gates, named(w)[x])
    count(w, counters.ACCESSES, layer, w["demanded"])
    count(w, counters.ASSIGNMENTS, layer, w["assignments"])
    if w["has_suggest"] == 1:
        count(w, counters.PREDICTED_DEMANDED, layer, foreseen)
        count(w, counters.PREDICTABLE, layer, predictable)
        for x in range(layer * w["experts"], (layer + 1) * w["experts"]):
            named(w)[x] = 0


# look-up and misses


@fast
def look_up(w, hooks, first, last):
    """Classify demanded experts [first, last) against this moment; the miss policy decides on those that are absent."""
    w["absent"] = 0
    for n in range(first, last):
        classify(w, accesses(w)[n - first], n)
        if accesses(w)[n - first]["served"] == FETCH:
            missing(w)[w["absent"]] = n
            w["absent"] += 1
    w["served"] = last - first
    if w["absent"] > 0 and w["has_resolve"] == 1:
        resolve(w, hooks, first, w["absent"])
    count_absent(w)
    if w["knows_future"] == 1:
        for n in range(first, last):
            experts(w)[demand_expert(w)[n]]["next_use"] = demand_next(w)[n]
            if w["reads_passes"] == 1:
                experts(w)[demand_expert(w)[n]]["next_pass"] = demand_pass(w)[n]
            if w["minds_future"] == 1:
                touch(w, demand_expert(w)[n])


@called
def classify(w, access, n):
    """Hit, late, or missing for a reason."""
    x, want, layer = demand_expert(w)[n], wants(w)[n], now(w)["layer"]
    access["n"], access["x"], access["tokens"] = n, x, demand_tokens(w)[n]
    y = find(w, x, want, RESIDENT)
    if y != NONE:
        access["y"], access["served"] = y, HIT
        count(w, counters.HITS, layer, 1)
        note(w, IS_HIT, y, BY_GATE)
        if copies(w)[y]["prefetched"] == 1:
            count(w, counters.PREFETCH_HITS, layer, 1)
            count(w, counters.PREFETCH_USED, layer, 1)
        return
    y = find(w, x, want, IN_FLIGHT)
    if y != NONE:
        access["y"], access["served"] = y, LATE
        count(w, counters.LATE, layer, 1)
        note(w, IS_LATE, y, BY_GATE)
        meet(w, y)
        return
    access["y"], access["served"] = x * w["precisions"] + want, FETCH
    why = reason(w, x, want)
    count(w, counters.MISSES, layer, 1)
    count(w, why, layer, 1)
    note(w, line_of(why), access["y"], BY_GATE)


@fast
def line_of(why):
    """The event log's name of a reason."""
    if why == counters.COMPULSORY:
        return IS_COMPULSORY
    return IS_COLLISION if why == counters.COLLISIONS else IS_CAPACITY


@called
def meet(w, y):
    """A demand waits for this transfer."""
    mine = owned(w)[y]
    if mine["prefetch"] == 1 and mine["awaited"] == 0:
        mine["awaited"] = 1
        count(w, counters.PREFETCH_USED, layer_of(w, y), 1)


@called
def count_absent(w):
    """Tell policies how many of those looked up are absent and run all the same."""
    total = max(now(w)["absent"], 0)
    if w["absent"] > 0:
        for i in range(w["served"]):
            served = accesses(w)[i]["served"]
            total += 1 if served == FETCH or served == ON_CPU else 0
    now(w)["absent"] = total


@fast
def resolve(w, hooks, first, absent):
    """Ask the miss policy about all that is absent, then obey in demand order."""
    for m in range(absent):
        verdict(w)[m] = 0
    hooks.resolve(w, absent, free_bytes(w, accesses(w)[missing(w)[0] - first]["y"]))
    for m in range(absent):
        obey(w, hooks, accesses(w)[missing(w)[m] - first], verdict(w)[m])


@fast
def obey(w, hooks, access, decided):
    """One verdict."""
    if decided == DROP:
        drop(w, access)
    elif decided == PER_TOKEN:
        substitute(w, hooks.substitute, access)
    elif decided == CPU:
        access["served"], access["y"] = ON_CPU, access["x"] * w["precisions"]
        count(w, counters.CPU_EXECUTED, now(w)["layer"], 1)
    elif 0 <= decided <= wants(w)[access["n"]]:
        access["y"] = access["x"] * w["precisions"] + decided
    else:
        w["error"], w["culprit"] = BAD_VERDICT, decided


# use


@fast
def use_all(w, hooks):
    """Stamp, protect and, where absent, queue what will be executed from the fast tier."""
    base = now(w)["layer"] * w["experts"]
    for i in range(w["served"]):
        access = accesses(w)[i]
        slot(w)[access["x"] - base] = i
        if w["precisions"] > 1 and runs(access["served"]):
            tier(w)[access["x"] - base] = access["y"] - access["x"] * w["precisions"]
        if runs_here(access["served"]):
            if access["n"] == NONE:  # the demanded are marked already
                experts(w)[access["x"]]["needed"] = 1
            use(w, hooks, access["y"])
            protect(w, access["y"])
            if access["y"] != access["x"] * w["precisions"]:
                count(w, counters.LOW_PRECISION, now(w)["layer"], 1)
        else:
            experts(w)[access["x"]]["needed"] = 0
            if w["minds_demand"] == 1:
                touch(w, access["x"])
    for i in range(w["served"]):
        access = accesses(w)[i]
        if waits(access["served"]):
            w["coming"] += 1
        if access["served"] == FETCH:
            fetch(w, access["y"])
        elif access["served"] == HIT and owned(w)[access["y"]]["side"] == 1:
            promote(w, hooks, access["y"])


@called
def clear_slots(w):
    """No expert is served by any access any more."""
    base = now(w)["layer"] * w["experts"]
    for i in range(w["served"]):
        slot(w)[accesses(w)[i]["x"] - base] = NONE


# prefetch


@fast
def suggest(w, hooks):
    """Ask the prefetch policy, and queue what is absent."""
    for i in range(ask_names(w, hooks.suggest)):
        name(w, hooks, suggested(w)[i])


@fast
def ask_names(w, hook):
    """How many copies the prefetch policy names; none, with an error set, if it names what does not exist."""
    if w["renews"] == 1:  # what it named before and is still queued is named anew, or is not wanted any more
        cancel(w, now(w)["step"] + w["layers"])
    total = hook(w)
    if not 0 <= total <= w["n_copies"]:
        w["error"], w["culprit"] = BAD_NAME, total
        return 0
    for i in range(total):
        if not 0 <= suggested(w)[i] < w["n_copies"]:
            w["error"], w["culprit"] = BAD_NAME, suggested(w)[i]
            return 0
    return total


@fast
def name(w, hooks, y):
    """A prefetch policy names a copy."""
    x, layer = expert_of(w, y), layer_of(w, y)
    precision = y - x * w["precisions"]
    count(w, counters.PREDICTED, layer, 1)
    named(w)[x] += 1
    resident = find(w, x, precision, RESIDENT)
    if resident != NONE:
        predict(w, hooks, resident)
    elif find(w, x, precision, IN_FLIGHT) == NONE and find(w, x, precision, QUEUED) == NONE:
        prefetch(w, y, now(w)["step"] + layer - now(w)["layer"])
