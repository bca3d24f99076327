"""Victim selection: a candidate by the policy's keys or by its own hook, or else a pinned copy as the last resort."""

from __future__ import annotations

from policies.contract import NONE
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.ranking import is_candidate, smallest
from simulator.compiled.runtime.state import BAD_VICTIM, answers, asked, copies, done, expert_of, experts, owned, pools


@fast
def choose(w, hooks, pool, y):
    """The copy of the pool that leaves for y: a candidate, or else a spare one; NONE with an error set."""
    if w["by_key"] == 0:
        return named(w, hooks.victim, pool, y)
    if pools(w)[pool]["open"] > 0:
        return smallest(w, hooks.keys, pool)
    return smallest_spare(w, hooks.keys, pool)


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
def admits(w, hook, y, victim):
    """Whether the policy lets y push the victim out."""
    return hook(w, y, w["speculative"], victim)


# the last resort


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
