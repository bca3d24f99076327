"""Room in a pool: whether it can be made, who leaves, and the books of that."""

from __future__ import annotations

from policies.contract import ABSENT, NONE
from simulator.compiled.events import teller
from simulator.compiled.jit import called, fast
from simulator.compiled.ledger import BYTES_WASTED, EVICTIONS, count, lived
from simulator.compiled.log import IS_EVICT, note
from simulator.compiled.order import is_candidate, leave_pool, smallest
from simulator.compiled.state import (
    BAD_VICTIM,
    answers,
    aside,
    asked,
    copies,
    done,
    expert_of,
    experts,
    layer_of,
    now,
    owned,
    pools,
)
from simulator.compiled.tier import forget_uses, release, shut

tell_evicted = teller("on_evict")

GRANTED, STREAMED, REFUSED = range(3)
#: What a copy that was set aside was before.
WAS_OPEN, WAS_SPARE = 1, 2


@fast
def make_room(w, hands, y):
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
        return evict_if_all_may(w, hands, y)
    agreed = w["has_admit"] == 0
    while room["used"] + size > room["capacity"]:
        victim = choose(w, hands, pool, y)
        if victim == NONE:
            return REFUSED  # and the run ends with an error
        if not agreed and not admits(w, hands.admit, y, victim):
            return declined(w)
        agreed = True
        evict(w, hands, victim, y)
    return GRANTED


@fast
def declined(w):
    """What becomes of a transfer that the policy does not let in."""
    return REFUSED if w["speculative"] == 1 or w["staged"] != NONE else STREAMED


@called
def evict_if_all_may(w, hands, y):
    """Every victim is named and asked about before one leaves; all stand as they did before when that is decided."""
    room = pools(w)[copies(w)[y]["pool"]]
    short = room["used"] + copies(w)[y]["bytes"] - room["capacity"]
    verdict, w["aside_now"] = GRANTED, 0
    while verdict == GRANTED and short > 0:
        victim = choose(w, hands, copies(w)[y]["pool"], y)
        if victim == NONE:
            verdict = REFUSED  # and the run ends with an error
        elif not admits(w, hands.admit, y, victim):
            verdict = declined(w)
        else:
            short -= copies(w)[victim]["bytes"]
            set_aside(w, victim, short > 0)
    put_back(w)
    if verdict != GRANTED:
        return verdict
    for i in range(w["aside_now"]):
        evict(w, hands, aside(w)[i], y)
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


@called
def admits(w, hook, y, victim):
    """Whether the policy lets y push the victim out."""
    return hook(w, y, w["speculative"], victim)


# who leaves


@fast
def choose(w, hands, pool, y):
    """The copy of the pool that leaves for y: a candidate, or else a spare one; NONE with an error set."""
    if w["by_key"] == 0:
        return named(w, hands.victim, pool, y)
    if pools(w)[pool]["open"] > 0:
        return smallest(w, hands.key, pool)
    return smallest_spare(w, hands.key, pool)


@called
def named(w, hook, pool, y):
    """By the policy's own hook. It reads `protected`, so spare copies lose that while they are asked about."""
    lend = pools(w)[pool]["open"] == 0
    if lend:
        lend_spare(w, pool, 0)
    victim = hook(w, pool, y)
    legal = 0 <= victim < w["n_copies"] and copies(w)[victim]["pool"] == pool and is_candidate(w, victim)
    if lend:
        lend_spare(w, pool, 1)
    if legal:
        return victim
    w["error"], w["culprit"] = BAD_VICTIM, victim
    return NONE


@called
def lend_spare(w, pool, protected):
    """Spare copies of a pool look like this until further notice; nothing else of it is unprotected then."""
    for i in range(w["done_now"]):
        y = done(w)[i]
        if copies(w)[y]["pool"] == pool and owned(w)[y]["aside"] == 0:
            copies(w)[y]["protected"] = protected


@fast
def is_spare(w, y, pool):
    """Demanded by this step, already computed and not set aside: the last resort of a demand."""
    protected = copies(w)[y]["protected"] == 1 and owned(w)[y]["aside"] == 0
    return protected and copies(w)[y]["pool"] == pool


@called
def spare_bytes_suffice(w, pool, short):
    """Whether those hold so many bytes."""
    for i in range(w["done_now"]):
        if short <= 0:
            return True
        if is_spare(w, done(w)[i], pool):
            short -= copies(w)[done(w)[i]]["bytes"]
    return short <= 0


@called
def smallest_spare(w, keys, pool):
    """Among those, of which there are few: the smallest (key, stamp, copy), as in the tournament."""
    w["spares"] = 0
    for i in range(w["done_now"]):
        if is_spare(w, done(w)[i], pool):
            asked(w)[w["spares"]] = done(w)[i]
            w["spares"] += 1
    keys(w, w["spares"])
    best = w["spares"] - 1
    for i in range(w["spares"] - 1):
        if spare_beats(w, i, best):
            best = i
    return asked(w)[best]


@called
def spare_beats(w, i, j):
    """Whether the i-th copy asked for leaves before the j-th."""
    if answers(w)[i] != answers(w)[j]:
        return answers(w)[i] < answers(w)[j]
    a, b = asked(w)[i], asked(w)[j]
    ours, theirs = experts(w)[expert_of(w, a)]["last_use"], experts(w)[expert_of(w, b)]["last_use"]
    return ours < theirs or (ours == theirs and a < b)


# leaving


@fast
def evict(w, hands, y, incoming):
    """Out of its pool."""
    copy = copies(w)[y]
    pools(w)[copy["pool"]]["used"] -= copy["bytes"]
    leave_pool(w, y)
    if owned(w)[y]["done"] == 1:
        forget_done(w, y)
    leave(w, y, incoming)
    if w["listeners_on_evict"] != 0:
        tell_evicted(w, hands, y)


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
