"""The fast tier: what is where, what its use leaves behind, and what may not leave."""

from __future__ import annotations

from policies.contract import ABSENT, NONE, RESIDENT
from simulator.compiled.events import teller
from simulator.compiled.jit import called, fast
from simulator.compiled.ledger import CAPACITY, COLLISIONS, COMPULSORY
from simulator.compiled.order import disturb, touch
from simulator.compiled.state import NEVER_LEFT, copies, done, expert_of, experts, now, owned, pools, protected

tell_predicted = teller("on_predict")
tell_used = teller("on_use")

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
def use(w, hands, y):
    """A demanded expert is (or will be) resident and is used."""
    x = expert_of(w, y)
    count_use(w, x, y)
    if w["listeners_on_use"] != 0:
        tell_used(w, hands, y)
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
def predict(w, hands, y):
    """A prefetch policy named a resident copy."""
    hint(w, expert_of(w, y))
    if w["listeners_on_predict"] != 0:
        tell_predicted(w, hands, y)


@fast
def hint(w, x):
    """An expert is named while it is there."""
    w["stamps"] += 1
    experts(w)[x]["last_hint"], experts(w)[x]["hint_pass"] = w["stamps"], now(w)["pass"]
    if w["minds_hints"] == 1:
        touch(w, x)


# protection


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
