"""The gate of a plain world: what is demanded is looked up, used and, where it is absent, queued; then prefetches."""

from __future__ import annotations

from policies.contract import IN_FLIGHT, QUEUED, RESIDENT
from simulator.compiled import ledger
from simulator.compiled.jit import fast
from simulator.compiled.ledger import count
from simulator.compiled.link import cancel, mask, prefetch
from simulator.compiled.order import disturb, touch
from simulator.compiled.plain.queue import BY_LAST_USE, NO_QUEUE, move_last
from simulator.compiled.state import (
    BAD_NAME,
    all_copies,
    all_experts,
    all_suggested,
    copies,
    demand_expert,
    demand_next,
    demand_pass,
    demand_sum,
    demands,
    experts,
    found,
    layer_of,
    named,
    now,
    own_prefetch,
    owned,
    pools,
    slot,
    suggested,
)
from simulator.compiled.step import read_ids, read_scores, read_weights, recall, step_of
from simulator.compiled.tier import stamp


@fast
def open_gate(w, hooks):
    """Everything that is decided at once."""
    now(w)["gated"], w["gated_at"], w["spent"] = 1, w["time"], 0
    recall(w)
    if w["ask_first"] < w["ask_end"]:
        cancel(w, now(w)["step"])
    if w["has_suggest"] == 1:
        read_the_rest(w)
    look_up(w)
    if w["has_suggest"] == 1 and w["after_demand"] == 0:
        suggest(w, hooks.suggest)


@fast
def read_the_rest(w):
    """Of what prefetch policies see."""
    read_ids(w)
    if w["scored"] == 1:
        read_scores(w)
    if w["reads_weights"] == 1 and w["weighted"] == 1:
        read_weights(w)


# look-up


@fast
def look_up(w):
    """Hits, lates and misses, each used in demand order."""
    layer, ever, late, collided = now(w)["layer"], 0, 0, 0
    w["in_place"], w["coming"] = 0, 0
    count_named(w, layer)
    for n in range(w["demanded"]):
        x = demand_expert(w)[n]
        need(w, x, n)
        state = copies(w)[x]["state"]
        if state == RESIDENT:
            hit(w, x, n, layer)
        else:
            wait_for(w, x, n)
            if state == IN_FLIGHT:
                late += 1
                meet(w, x, layer)
            else:
                ever += owned(w)[x]["ever"]
                collided += has_collided(w, x)
                fetch(w, x)
        use(w, x)
    count(w, ledger.ACCESSES, layer, w["demanded"])
    count(w, ledger.ASSIGNMENTS, layer, w["assignments"])
    count(w, ledger.HITS, layer, w["in_place"])
    count(w, ledger.LATE, layer, late)
    count_misses(w, layer, w["coming"] - late, ever, collided)


@fast
def count_named(w, layer):
    """How much of the demand a prefetch policy had named."""
    if w["has_suggest"] == 0:
        return
    for n in range(w["demanded"]):
        count(w, ledger.PREDICTED_DEMANDED, layer, named(w)[demand_expert(w)[n]])
    for x in range(layer * w["experts"], (layer + 1) * w["experts"]):
        named(w)[x] = 0


@fast
def count_misses(w, layer, misses, ever, collided):
    """By their reasons: never there, evicted in this pass, or else."""
    now(w)["absent"] = misses
    count(w, ledger.MISSES, layer, misses)
    count(w, ledger.COMPULSORY, layer, misses - ever)
    count(w, ledger.COLLISIONS, layer, collided)
    count(w, ledger.CAPACITY, layer, ever - collided)


@fast
def need(w, x, n):
    """What the tables say of a demanded expert."""
    expert = experts(w)[x]
    expert["needed"] = 1
    expert["mass_ever"] += demand_sum(w)[n]
    if w["knows_future"] == 1:
        expert["next_use"] = demand_next(w)[n]
        if w["reads_passes"] == 1:
            expert["next_pass"] = demand_pass(w)[n]


@fast
def hit(w, x, n, layer):
    """It is there, and stays."""
    copy = copies(w)[x]
    found(w)[w["in_place"]] = n
    w["in_place"] += 1
    pools(w)[copy["pool"]]["open"] -= copy["bytes"]
    if w["queue"] == NO_QUEUE:
        disturb(w, x)
    if copy["prefetched"] == 1:
        count(w, ledger.PREFETCH_HITS, layer, 1)
        count(w, ledger.PREFETCH_USED, layer, 1)


@fast
def wait_for(w, x, n):
    """It is not there yet."""
    slot(w)[x - now(w)["layer"] * w["experts"]] = n
    w["coming"] += 1


@fast
def meet(w, x, layer):
    """A demand waits for its transfer."""
    mine = owned(w)[x]
    if mine["prefetch"] == 1 and mine["awaited"] == 0:
        mine["awaited"] = 1
        count(w, ledger.PREFETCH_USED, layer, 1)


@fast
def has_collided(w, x):
    """1 if it was evicted in this very pass."""
    mine = owned(w)[x]
    return 1 if mine["ever"] == 1 and mine["evicted_pass"] == now(w)["pass"] else 0


@fast
def fetch(w, x):
    """Queue a demand."""
    mine = owned(w)[x]
    copies(w)[x]["state"] = QUEUED
    mine["prefetch"], mine["awaited"] = 0, 0
    demands(w)[mask(w, w["demand_end"])] = x
    w["demand_end"] += 1


@fast
def use(w, x):
    """It is, or will be, resident, and no victim before the step's end."""
    copy, expert = copies(w)[x], experts(w)[x]
    stamp(w, x)
    expert["uses_ever"] += 1
    expert["uses_here"] = max(1, expert["uses_here"] + 1 - copy["prefetched"] * owned(w)[x]["counted"])
    copy["prefetched"], copy["protected"] = 0, 1
    if w["queue"] == BY_LAST_USE:
        move_last(w, x)


# prefetch


@fast
def suggest(w, hook):
    """Ask the prefetch policy, and queue what is absent."""
    if w["renews"] == 1:
        cancel(w, now(w)["step"] + w["layers"])
    total = hook(now(w), step_of(w, w["demanded"]), all_experts(w), all_copies(w), own_prefetch(w), all_suggested(w))
    if not 0 <= total <= w["n_copies"]:
        w["error"], w["culprit"] = BAD_NAME, total
        return
    for i in range(total):
        if not 0 <= suggested(w)[i] < w["n_copies"]:
            w["error"], w["culprit"] = BAD_NAME, suggested(w)[i]
            return
        name(w, suggested(w)[i])


@fast
def name(w, x):
    """A prefetch policy names an expert."""
    layer, state = layer_of(w, x), copies(w)[x]["state"]
    count(w, ledger.PREDICTED, layer, 1)
    named(w)[x] += 1
    if state == RESIDENT:
        hint(w, x)
    elif state != IN_FLIGHT and state != QUEUED:
        prefetch(w, x, now(w)["step"] + layer - now(w)["layer"])


@fast
def hint(w, x):
    """It is named while it is there."""
    w["stamps"] += 1
    experts(w)[x]["last_hint"], experts(w)[x]["hint_pass"] = w["stamps"], now(w)["pass"]
    if w["minds_hints"] == 1:
        touch(w, x)
