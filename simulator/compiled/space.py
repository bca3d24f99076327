"""Victim selection and space in a pool: whether evictions can free enough, and whether the policy admits a copy."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.cache import evict, pin_unlisted, show_last_resort, unpin
from moereplay.simulator.compiled.ranking import NO_QUEUE, first_of_queue, is_candidate, request_key, smallest
from moereplay.simulator.compiled.state import (
    BAD_VICTIM,
    expert_of,
    fail,
    pool_of,
)
from moereplay.simulator.jit.marks import called, fast

GRANTED, BYPASSED, REFUSED = range(3)
#: State of a victim before it was set aside: a candidate, or evictable as a last resort.
WAS_CANDIDATE, WAS_LAST_RESORT = 1, 2


@fast
def make_space(s, hooks, y, prefetch):
    """Evict enough for copy y, if that is possible and the policy admits y. `prefetch`: 1 if no demand waits for y."""
    pool, size = pool_of(s, y), s.copies[y]["bytes"]
    bytes_of = s.pools[pool]
    short = bytes_of["used"] + size - bytes_of["capacity"]
    if short <= 0:
        return GRANTED
    if prefetch == 1 and s["free_only"] == 1:
        return REFUSED
    if short > bytes_of["open"] and (prefetch == 1 or not last_resort_suffices(s, pool, short - bytes_of["open"])):
        return REFUSED
    if s["asks_of_each"] == 1:
        return evict_if_all_may(s, hooks, y, prefetch)
    agreed = False  # the policy decides on admission once, with the first victim
    while bytes_of["used"] + size > bytes_of["capacity"]:
        victim = choose_victim(s, hooks, pool, y)
        if victim == NONE:
            return REFUSED  # an error is set
        if s["has_admit"] == 1 and not agreed and not admits(s, hooks.admit, y, prefetch, victim):
            return rejected(s, prefetch)
        agreed = True
        evict(s, hooks, victim, y)
    return GRANTED


@fast
def choose_victim(s, hooks, pool, y):
    """Return the victim for y: a candidate, or else a last-resort copy; NONE with an error set."""
    if s["by_key"] == 1:
        return victim_by_key(s, hooks.key, pool)
    last_resort = s.pools[pool]["open"] == 0
    if last_resort:
        show_last_resort(s, pool, 0)  # the hook reads `protected`
    victim = victim_of_policy(s, hooks.victim, pool, y)
    if last_resort:
        show_last_resort(s, pool, 1)
    return victim


@fast
def rejected(s, prefetch):
    """Return the verdict on a transfer that the policy rejects."""
    return REFUSED if prefetch == 1 or s["cache"]["bypassed"] != NONE else BYPASSED


@called
def evict_if_all_may(s, hooks, y, prefetch):
    """Select all victims and decide admission before the first eviction, so that hooks see unchanged tables."""
    bytes_of = s.pools[pool_of(s, y)]
    short = bytes_of["used"] + s.copies[y]["bytes"] - bytes_of["capacity"]
    verdict, s["space"]["aside_now"] = GRANTED, 0
    while verdict == GRANTED and short > 0:
        victim = choose_victim(s, hooks, pool_of(s, y), y)
        if victim == NONE:
            verdict = REFUSED  # an error is set
        elif not admits(s, hooks.admit, y, prefetch, victim):
            verdict = rejected(s, prefetch)
        else:
            short -= s.copies[victim]["bytes"]
            set_aside(s, victim, short > 0)
    restore_candidates(s)
    if verdict == GRANTED:
        for i in range(s["space"]["aside_now"]):
            evict(s, hooks, s.chosen_victims[i], y)
    return verdict


@fast
def set_aside(s, y, more):
    """Record a victim; while more are selected it is not a candidate."""
    s.chosen_victims[s["space"]["aside_now"]] = y
    s["space"]["aside_now"] += 1
    if more:
        s.owned[y]["aside"] = WAS_LAST_RESORT if s.copies[y]["protected"] == 1 else WAS_CANDIDATE
        pin_unlisted(s, y)


@fast
def restore_candidates(s):
    """Restore the copies that were set aside."""
    for i in range(s["space"]["aside_now"]):
        y = s.chosen_victims[i]
        if s.owned[y]["aside"] == WAS_CANDIDATE:
            unpin(s, y)
        s.owned[y]["aside"] = 0


# victim selection: a candidate by key or by the policy's hook


@fast
def victim_by_key(s, keys, pool):
    """Return the first victim by key: a candidate, or else a last-resort copy; there must be one."""
    if s.pools[pool]["open"] <= 0:
        return smallest_last_resort(s, keys, pool)
    if s["queue"] != NO_QUEUE:
        return first_of_queue(s, pool)
    return smallest(s, keys, pool)


@called
def victim_of_policy(s, hook, pool, y):
    """Return the policy's victim; NONE, and end the run, if it is not a candidate of the pool."""
    victim = hook(s, pool, y)
    if 0 <= victim < s["n_copies"] and s.copies[victim]["pool"] == pool and is_candidate(s, victim):
        return victim
    fail(s, BAD_VICTIM, victim)
    return NONE


@called
def admits(s, hook, y, prefetch, victim):
    """Return whether the policy admits copy y in place of the victim."""
    return hook(s, y, prefetch, victim)


# last resort: copies whose compute has ended in this step


@fast
def is_last_resort(s, y, pool):
    """Return whether copy y is demanded by this step, computed and not set aside: only a demand may evict it."""
    protected = s.copies[y]["protected"] == 1 and s.owned[y]["aside"] == 0
    return protected and s.copies[y]["pool"] == pool


@called
def last_resort_suffices(s, pool, short):
    """Return whether last-resort copies hold at least `short` bytes."""
    for i in range(s["cache"]["done_now"]):
        if short <= 0:
            return True
        if is_last_resort(s, s.done[i], pool):
            short -= s.copies[s.done[i]]["bytes"]
    return short <= 0


@called
def smallest_last_resort(s, keys, pool):
    """Return the smallest (key, logical timestamp, copy) of the few last-resort copies."""
    count = 0
    for i in range(s["cache"]["done_now"]):
        if is_last_resort(s, s.done[i], pool):
            request_key(s, count, s.done[i])
            count += 1
    keys(s, count)
    best = count - 1
    for i in range(count - 1):
        if leaves_before(s, i, best):
            best = i
    return s.eval_copies[best]


@called
def leaves_before(s, i, j):
    """Return whether the i-th copy of the batch is evicted before the j-th."""
    if s.eval_keys[i] != s.eval_keys[j]:
        return s.eval_keys[i] < s.eval_keys[j]
    a, b = s.eval_copies[i], s.eval_copies[j]
    ours, theirs = s.experts[expert_of(s, a)]["last_use"], s.experts[expert_of(s, b)]["last_use"]
    return ours < theirs or (ours == theirs and a < b)
