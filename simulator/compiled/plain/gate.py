"""The gate of a plain world: what is demanded is looked up, used and, where it is absent, queued; then prefetches."""

from __future__ import annotations

from policies.contract import IN_FLIGHT, QUEUED, RESIDENT
from simulator.compiled import counters
from simulator.compiled.cache import count_use, hint
from simulator.compiled.counters import count, count_here
from simulator.compiled.demand import read_gate, route
from simulator.compiled.gate import ask_names, meet
from simulator.compiled.link import cancel, fetch, prefetch
from simulator.compiled.plain.queue import BY_LAST_USE, NO_QUEUE, move_last
from simulator.compiled.runtime.jit import fast
from simulator.compiled.runtime.ranking import disturb
from simulator.compiled.runtime.state import (
    copies,
    demand_expert,
    demand_mass,
    demand_next,
    demand_pass,
    demand_rank,
    demand_sum,
    demand_tokens,
    experts,
    found,
    layer_of,
    named,
    now,
    offsets,
    owned,
    pools,
    slot,
    stream_expert,
    stream_mass,
    stream_next,
    stream_pass,
    stream_rank,
    stream_sum,
    stream_tokens,
    suggested,
)


@fast
def open_gate(w, hooks):
    """Everything that is decided at once."""
    now(w)["gated"], now(w)["absent"] = 1, -1
    w["gated_at"], w["spent"], w["changed"] = w["time"], 0, 0
    if w["has_choose"] == 1:
        route(w, hooks)
    if w["ask_first"] < w["ask_end"]:
        cancel(w, now(w)["step"])
    look_up(w)
    if w["has_suggest"] == 1 and w["after_demand"] == 0:
        suggest(w, hooks.suggest)


# look-up


@fast
def look_up(w):
    """Hits, lates and misses, each used in demand order."""
    w["in_place"], w["coming"], late, ever, collided = 0, 0, 0, 0, 0
    first = begin_demand(w)
    for n in range(w["demanded"]):
        if w["has_choose"] == 0:
            recall_one(w, n, first + n)
        x = demand_expert(w)[n]
        need(w, n, x)
        state = copies(w)[x]["state"]
        if state == RESIDENT:
            hit(w, n, x)
        elif state == IN_FLIGHT:
            wait_for(w, n, x)
            meet(w, x)
            late += 1
        else:
            wait_for(w, n, x)
            ever += owned(w)[x]["ever"]
            collided += has_collided(w, x)
            fetch(w, x)
        use(w, x)
    count_look_up(w, late, ever, collided)


@fast
def begin_demand(w):
    """Where the step begins in the recorded stream, which is followed unless routing chose."""
    step = w["index"] * w["layers"] + now(w)["layer"]
    if w["has_choose"] == 0:
        w["demanded"], w["assignments"], w["mass"] = offsets(w)[step + 1] - offsets(w)[step], 0, 0
    return offsets(w)[step]


@fast
def recall_one(w, n, at):
    """The n-th demanded expert as recorded."""
    demand_expert(w)[n] = now(w)["layer"] * w["experts"] + stream_expert(w)[at]
    demand_tokens(w)[n], demand_sum(w)[n] = stream_tokens(w)[at], stream_sum(w)[at]
    w["assignments"] += stream_tokens(w)[at]
    w["mass"] += stream_sum(w)[at]
    if w["knows_future"] == 1:
        demand_next(w)[n] = stream_next(w)[at]
        if w["reads_passes"] == 1:
            demand_pass(w)[n] = stream_pass(w)[at]
    if w["reads_demand"] == 1:
        demand_rank(w)[n], demand_mass(w)[n] = stream_rank(w)[at], stream_mass(w)[at]


@fast
def count_look_up(w, late, ever, collided):
    """A miss is of one never there, of one evicted in this pass, or else."""
    misses = w["coming"] - late
    now(w)["absent"] = misses
    count_here(w, counters.ACCESSES, w["demanded"])
    count_here(w, counters.ASSIGNMENTS, w["assignments"])
    count_here(w, counters.HITS, w["in_place"])
    count_here(w, counters.LATE, late)
    count_here(w, counters.MISSES, misses)
    count_here(w, counters.COMPULSORY, misses - ever)
    count_here(w, counters.COLLISIONS, collided)
    count_here(w, counters.CAPACITY, ever - collided)


@fast
def need(w, n, x):
    """What the tables say of a demanded expert."""
    expert = experts(w)[x]
    expert["needed"] = 1
    expert["mass_ever"] += demand_sum(w)[n]
    if w["knows_future"] == 1:
        expert["next_use"] = demand_next(w)[n]
        if w["reads_passes"] == 1:
            expert["next_pass"] = demand_pass(w)[n]
    if w["has_suggest"] == 1:
        count_here(w, counters.PREDICTED_DEMANDED, named(w)[x])
        count_here(w, counters.PREDICTABLE, max(min(now(w)["layer"], w["reach"]), named(w)[x]))


@fast
def hit(w, n, x):
    """It is there, and stays."""
    copy = copies(w)[x]
    found(w)[w["in_place"]] = n
    w["in_place"] += 1
    pools(w)[copy["pool"]]["open"] -= copy["bytes"]
    if w["queue"] == NO_QUEUE:
        disturb(w, x)
    if copy["prefetched"] == 1:
        count_here(w, counters.PREFETCH_HITS, 1)
        count_here(w, counters.PREFETCH_USED, 1)


@fast
def wait_for(w, n, x):
    """It is not there yet."""
    slot(w)[x - now(w)["layer"] * w["experts"]] = n
    w["coming"] += 1


@fast
def has_collided(w, x):
    """1 if it was evicted in this very pass."""
    mine = owned(w)[x]
    return 1 if mine["ever"] == 1 and mine["evicted_pass"] == now(w)["pass"] else 0


@fast
def use(w, x):
    """It is, or will be, resident, and no victim before the step's end."""
    count_use(w, x, x)
    copies(w)[x]["prefetched"], copies(w)[x]["protected"] = 0, 1
    if w["queue"] == BY_LAST_USE:
        move_last(w, x)


# prefetch


@fast
def suggest(w, hook):
    """Ask the prefetch policy, and queue what is absent."""
    layer = now(w)["layer"]
    for x in range(layer * w["experts"], (layer + 1) * w["experts"]):
        named(w)[x] = 0  # and counted
    if w["has_choose"] == 0 and w["reads_gate"] == 1:  # else it is read already, or nobody looks
        read_gate(w)
    for i in range(ask_names(w, hook)):
        name(w, suggested(w)[i])


@fast
def name(w, x):
    """A prefetch policy names an expert."""
    layer, state = layer_of(w, x), copies(w)[x]["state"]
    count(w, counters.PREDICTED, layer, 1)
    named(w)[x] += 1
    if state == RESIDENT:
        hint(w, x)
    elif state != IN_FLIGHT and state != QUEUED:
        prefetch(w, x, now(w)["step"] + layer - now(w)["layer"])
