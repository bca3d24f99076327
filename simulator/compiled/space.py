"""Making space in a pool: whether enough can be evicted, whether the policy agrees, and which copies are evicted."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.cache import evict, pin_unlisted, show_last_resort, unpin
from moereplay.simulator.compiled.state import chosen_victims, copies, owned, pool_of, pools
from moereplay.simulator.compiled.victims import admits, last_resort_suffices, named_by_policy, smallest_key
from moereplay.simulator.jit.marks import called, fast

GRANTED, BYPASSED, REFUSED = range(3)
#: What a chosen victim was before: a candidate, or evictable as a last resort.
WAS_CANDIDATE, WAS_LAST_RESORT = 1, 2


@fast
def make_space(s, hooks, y, prefetch):
    """Evict what y needs, if that is enough and the policy admits y. `prefetch`: 1 if no demand waits for y."""
    pool, size = pool_of(s, y), copies(s)[y]["bytes"]
    bytes_of = pools(s)[pool]
    short = bytes_of["used"] + size - bytes_of["capacity"]
    if short <= 0:
        return GRANTED
    if prefetch == 1 and s["free_only"] == 1:
        return REFUSED
    if short > bytes_of["open"] and (prefetch == 1 or not last_resort_suffices(s, pool, short - bytes_of["open"])):
        return REFUSED
    if s["asks_of_each"] == 1:
        return evict_if_all_may(s, hooks, y, prefetch)
    agreed = False
    while bytes_of["used"] + size > bytes_of["capacity"]:
        victim = choose_victim(s, hooks, pool, y)
        if victim == NONE:
            return REFUSED  # and the run ends with an error
        if s["has_admit"] == 1 and not agreed and not admits(s, hooks.admit, y, prefetch, victim):
            return rejected(s, prefetch)
        agreed = True
        evict(s, hooks, victim, y)
    return GRANTED


@fast
def choose_victim(s, hooks, pool, y):
    """The victim in the pool for y: a candidate, or else one of the last resort; NONE with an error set."""
    if s["by_key"] == 1:
        return smallest_key(s, hooks.key, pool)
    last_resort = pools(s)[pool]["open"] == 0
    if last_resort:
        show_last_resort(s, pool, 0)  # as the hook reads `protected`
    victim = named_by_policy(s, hooks.victim, pool, y)
    if last_resort:
        show_last_resort(s, pool, 1)
    return victim


@fast
def rejected(s, prefetch):
    """The verdict on a transfer that the policy rejects."""
    return REFUSED if prefetch == 1 or s["cache"]["bypassed"] != NONE else BYPASSED


@called
def evict_if_all_may(s, hooks, y, prefetch):
    """Every victim is selected and admission decided before one is evicted; until then the tables do not change."""
    bytes_of = pools(s)[pool_of(s, y)]
    short = bytes_of["used"] + copies(s)[y]["bytes"] - bytes_of["capacity"]
    verdict, s["space"]["aside_now"] = GRANTED, 0
    while verdict == GRANTED and short > 0:
        victim = choose_victim(s, hooks, pool_of(s, y), y)
        if victim == NONE:
            verdict = REFUSED  # and the run ends with an error
        elif not admits(s, hooks.admit, y, prefetch, victim):
            verdict = rejected(s, prefetch)
        else:
            short -= copies(s)[victim]["bytes"]
            set_aside(s, victim, short > 0)
    put_back(s)
    if verdict == GRANTED:
        for i in range(s["space"]["aside_now"]):
            evict(s, hooks, chosen_victims(s)[i], y)
    return verdict


@fast
def set_aside(s, y, more):
    """The copy is a victim; while more are selected it is no candidate."""
    chosen_victims(s)[s["space"]["aside_now"]] = y
    s["space"]["aside_now"] += 1
    if more:
        owned(s)[y]["aside"] = WAS_LAST_RESORT if copies(s)[y]["protected"] == 1 else WAS_CANDIDATE
        pin_unlisted(s, y)


@fast
def put_back(s):
    """Copies that were set aside are candidates again, or of the last resort, as before."""
    for i in range(s["space"]["aside_now"]):
        y = chosen_victims(s)[i]
        if owned(s)[y]["aside"] == WAS_CANDIDATE:
            unpin(s, y)
        owned(s)[y]["aside"] = 0
