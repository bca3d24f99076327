"""Victim selection: a candidate by key or by the policy's own hook, or else a computed copy as the last resort."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.errors import BAD_VICTIM, fail
from moereplay.simulator.compiled.queues import NO_QUEUE, first_of_queue
from moereplay.simulator.compiled.ranking import ask, may_leave, smallest
from moereplay.simulator.compiled.state import answers, asked, copies, done, expert_of, experts, owned, pools
from moereplay.simulator.jit.marks import called, fast


@fast
def smallest_key(s, keys, pool):
    """The candidate that is evicted first, or else one of the last resort; there must be one."""
    if pools(s)[pool]["open"] <= 0:
        return smallest_last_resort(s, keys, pool)
    if s["queue"] != NO_QUEUE:
        return first_of_queue(s, pool)
    return smallest(s, keys, pool)


@called
def named_by_policy(s, hook, pool, y):
    """The copy that the policy's hook returns; NONE, and the run ends, if that is no candidate of the pool."""
    victim = hook(s, pool, y)
    if 0 <= victim < s["n_copies"] and copies(s)[victim]["pool"] == pool and may_leave(s, victim):
        return victim
    fail(s, BAD_VICTIM, victim)
    return NONE


@called
def admits(s, hook, y, prefetch, victim):
    """Whether the policy admits y in place of the victim."""
    return hook(s, y, prefetch, victim)


# the last resort


@fast
def is_last_resort(s, y, pool):
    """Demanded by this step, already computed and not set aside: only a demand may evict it."""
    protected = copies(s)[y]["protected"] == 1 and owned(s)[y]["aside"] == 0
    return protected and copies(s)[y]["pool"] == pool


@called
def last_resort_suffices(s, pool, short):
    """Whether the copies of the last resort hold so many bytes."""
    for i in range(s["cache"]["done_now"]):
        if short <= 0:
            return True
        if is_last_resort(s, done(s)[i], pool):
            short -= copies(s)[done(s)[i]]["bytes"]
    return short <= 0


@called
def smallest_last_resort(s, keys, pool):
    """The smallest (key, logical timestamp, copy) of the last resort, which holds few."""
    count = 0
    for i in range(s["cache"]["done_now"]):
        if is_last_resort(s, done(s)[i], pool):
            ask(s, count, done(s)[i])
            count += 1
    keys(s, count)
    best = count - 1
    for i in range(count - 1):
        if leaves_before(s, i, best):
            best = i
    return asked(s)[best]


@called
def leaves_before(s, i, j):
    """Whether the i-th copy of the batch is evicted before the j-th."""
    if answers(s)[i] != answers(s)[j]:
        return answers(s)[i] < answers(s)[j]
    a, b = asked(s)[i], asked(s)[j]
    ours, theirs = experts(s)[expert_of(s, a)]["last_use"], experts(s)[expert_of(s, b)]["last_use"]
    return ours < theirs or (ours == theirs and a < b)
