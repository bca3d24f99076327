"""The fast tier: what is where, what its use leaves behind, what may not leave, and making space."""

from __future__ import annotations

from policies.contract import ABSENT, NONE, RESIDENT
from simulator.compiled.counters import BYTES_WASTED, CAPACITY, COLLISIONS, COMPULSORY, EVICTIONS, count, lived
from simulator.compiled.log import IS_EVICT, note
from simulator.compiled.runtime import listeners
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.ranking import disturb, leave_pool, touch
from simulator.compiled.runtime.state import (
    NEVER_LEFT,
    aside,
    copies,
    done,
    expert_of,
    experts,
    layer_of,
    now,
    owned,
    pools,
    protected,
)
from simulator.compiled.victims import admits, choose, spare_bytes_suffice

GRANTED, STREAMED, REFUSED = range(3)
#: What a copy that was set aside was before.
WAS_OPEN, WAS_SPARE = 1, 2

# look-up


@fast
def find(w, x, want, state):
    """The most precise copy of x in `state` that is at least as precise as `want`, or NONE."""
    first = x * w["precisions"]
    for y in range(first, first + want + 1):
        if copies(w)[y]["state"] == state:
            return y
    return NONE


@fast
def find_any(w, x, state):
    """The most precise copy of x in `state`, or NONE."""
    return find(w, x, w["precisions"] - 1, state)


@called
def reason(w, x, want):
    """Why x is missing, judged over the copies that would have done: the counter of that."""
    first, ever, latest = x * w["precisions"], False, NEVER_LEFT
    for y in range(first, first + want + 1):
        ever = ever or owned(w)[y]["ever"] == 1
        latest = max(latest, owned(w)[y]["evicted_pass"])
    if not ever:
        return COMPULSORY
    return COLLISIONS if latest == now(w)["pass"] else CAPACITY


@fast
def free_bytes(w, y):
    """Free bytes of the pool that y belongs to."""
    pool = pools(w)[copies(w)[y]["pool"]]
    return pool["capacity"] - pool["used"]


# use


@fast
def stamp(w, x):
    """A use, or the arrival of a prefetch."""
    w["stamps"] += 1
    experts(w)[x]["last_use"] = w["stamps"]
    experts(w)[x]["last_pass"] = now(w)["pass"]


@fast
def use(w, hooks, y):
    """A demanded expert is (or will be) resident and is used."""
    x = expert_of(w, y)
    count_use(w, x, y)
    if w["hears_use"] != 0:
        listeners.used(w, hooks, y)
    copies(w)[y]["prefetched"] = 0
    touch(w, x)


@fast
def count_use(w, x, y):
    """A use of expert x, of which y runs."""
    stamp(w, x)
    expert = experts(w)[x]
    expert["uses_ever"] += 1
    expert["uses_here"] = max(1, expert["uses_here"] + 1 - copies(w)[y]["prefetched"] * owned(w)[y]["counted"])


@fast
def forget_uses(w, x):
    """One of its copies went; another may still be here."""
    if w["precisions"] == 1 or find_any(w, x, RESIDENT) == NONE:
        experts(w)[x]["uses_here"] = 0


@fast
def predict(w, hooks, y):
    """A prefetch policy named a resident copy."""
    hint(w, expert_of(w, y))
    if w["hears_predict"] != 0:
        listeners.predicted(w, hooks, y)


@fast
def hint(w, x):
    """An expert is named while it is there."""
    w["stamps"] += 1
    experts(w)[x]["last_hint"], experts(w)[x]["hint_pass"] = w["stamps"], now(w)["pass"]
    if w["minds_hints"] == 1:
        touch(w, x)


# pins


@called
def protect(w, y):
    """Not a victim until released or the step's end."""
    mine = owned(w)[y]
    if mine["listed"] == 0:
        mine["listed"] = 1
        protected(w)[w["protected_now"]] = y
        w["protected_now"] += 1
    shut(w, y)


@fast
def shut(w, y):
    """It is no candidate until released."""
    copy = copies(w)[y]
    if copy["protected"] == 0:
        copy["protected"] = 1
        if owned(w)[y]["member"] == 1:
            pools(w)[copy["pool"]]["open"] -= copy["bytes"]
            if w["by_key"] == 1:
                disturb(w, y)


@called
def release(w, y):
    """Any transfer may evict it again."""
    copy = copies(w)[y]
    if copy["protected"] == 1:
        copy["protected"] = 0
        if owned(w)[y]["member"] == 1:
            pools(w)[copy["pool"]]["open"] += copy["bytes"]
            if w["by_key"] == 1:
                disturb(w, y)


@called
def computed(w, y):
    """Its compute has ended: a demand that finds nothing else may evict it; a streamed one is gone."""
    if w["staged"] == y:
        w["staged"] = NONE
        copies(w)[y]["state"] = ABSENT
        forget_uses(w, expert_of(w, y))
    elif owned(w)[y]["member"] == 1 and owned(w)[y]["done"] == 0:  # a side buffer holds no room of the pool
        owned(w)[y]["done"] = 1
        done(w)[w["done_now"]] = y
        w["done_now"] += 1


@called
def end_step(w):
    """Nothing is protected between a step's start and its gate."""
    for i in range(w["protected_now"]):
        y = protected(w)[i]
        owned(w)[y]["listed"] = 0
        release(w, y)
    for i in range(w["done_now"]):
        owned(w)[done(w)[i]]["done"] = 0
    w["protected_now"] = 0
    w["done_now"] = 0


# making space


@fast
def make_room(w, hooks, y):
    """Evict what must leave for y, if that is enough and the policy agrees. `speculative`: nobody waits for y."""
    pool, size = copies(w)[y]["pool"], copies(w)[y]["bytes"]
    room = pools(w)[pool]
    short = room["used"] + size - room["capacity"]
    if short <= 0:
        return GRANTED
    if w["speculative"] == 1 and w["free_only"] == 1:
        return REFUSED
    if short > room["open"] and (w["speculative"] == 1 or not spare_bytes_suffice(w, pool, short - room["open"])):
        return REFUSED
    if w["asks_of_each"] == 1:
        return evict_if_all_may(w, hooks, y)
    agreed = w["has_admit"] == 0
    while room["used"] + size > room["capacity"]:
        victim = choose(w, hooks, pool, y)
        if victim == NONE:
            return REFUSED  # and the run ends with an error
        if not agreed and not admits(w, hooks.admit, y, victim):
            return declined(w)
        agreed = True
        evict(w, hooks, victim, y)
    return GRANTED


@fast
def declined(w):
    """What becomes of a transfer that the policy does not let in."""
    return REFUSED if w["speculative"] == 1 or w["staged"] != NONE else STREAMED


@called
def evict_if_all_may(w, hooks, y):
    """Every victim is named and asked about before one leaves; all stand as they did before when that is decided."""
    room = pools(w)[copies(w)[y]["pool"]]
    short = room["used"] + copies(w)[y]["bytes"] - room["capacity"]
    verdict, w["aside_now"] = GRANTED, 0
    while verdict == GRANTED and short > 0:
        victim = choose(w, hooks, copies(w)[y]["pool"], y)
        if victim == NONE:
            verdict = REFUSED  # and the run ends with an error
        elif not admits(w, hooks.admit, y, victim):
            verdict = declined(w)
        else:
            short -= copies(w)[victim]["bytes"]
            set_aside(w, victim, short > 0)
    put_back(w)
    if verdict != GRANTED:
        return verdict
    for i in range(w["aside_now"]):
        evict(w, hooks, aside(w)[i], y)
    return GRANTED


@fast
def set_aside(w, y, others):
    """It is among those that leave; if others are to be named it is no candidate then."""
    aside(w)[w["aside_now"]] = y
    w["aside_now"] += 1
    if others:
        owned(w)[y]["aside"] = WAS_SPARE if copies(w)[y]["protected"] == 1 else WAS_OPEN
        shut(w, y)


@fast
def put_back(w):
    """Candidates are candidates again, and spare copies spare ones."""
    for i in range(w["aside_now"]):
        y = aside(w)[i]
        if owned(w)[y]["aside"] == WAS_OPEN:
            release(w, y)
        owned(w)[y]["aside"] = 0


# leaving


@fast
def evict(w, hooks, y, incoming):
    """Out of its pool."""
    copy = copies(w)[y]
    pools(w)[copy["pool"]]["used"] -= copy["bytes"]
    leave_pool(w, y)
    if owned(w)[y]["done"] == 1:
        forget_done(w, y)
    leave(w, y, incoming)
    if w["hears_evict"] != 0:
        listeners.evicted(w, hooks, y)


@called
def forget_done(w, y):
    """Out of the list of this step; it may come back and be computed again."""
    owned(w)[y]["done"] = 0
    w["done_now"] -= 1
    for i in range(w["done_now"]):
        if done(w)[i] == y:
            done(w)[i] = done(w)[w["done_now"]]


@fast
def leave(w, y, incoming):
    """The books of an eviction: charged to the layer that comes in, waste to the victim's."""
    copy, mine = copies(w)[y], owned(w)[y]
    layer = layer_of(w, y)
    count(w, EVICTIONS, layer_of(w, incoming), 1)
    lived(w, layer, now(w)["step"] - mine["entered_step"])
    if copy["prefetched"] == 1:
        count(w, BYTES_WASTED, layer, copy["bytes"])
    copy["state"], copy["protected"], copy["prefetched"] = ABSENT, 0, 0
    forget_uses(w, expert_of(w, y))
    mine["evicted_pass"] = now(w)["pass"]
    note(w, IS_EVICT, y, incoming)
