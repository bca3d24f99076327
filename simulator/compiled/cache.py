"""The fast tier: states of copies, uses, pins, arrivals and evictions."""

from __future__ import annotations

from moereplay.policies.contract import ABSENT, IN_FLIGHT, NONE, RESIDENT
from moereplay.simulator.compiled.counters import (
    BY_DEMAND,
    BYTES_WASTED,
    CAPACITY,
    COLLISIONS,
    COMPULSORY,
    DECLINED,
    EVICTIONS,
    INSERTIONS,
    IS_EVICT,
    IS_PROMOTE,
    count,
    lived,
    note,
)
from moereplay.simulator.compiled.ranking import (
    BY_ENTRY,
    BY_LAST_USE,
    NO_QUEUE,
    add_member,
    clear_needed,
    count_first_use,
    count_use,
    following,
    forget_uses,
    invalidate,
    invalidate_expert,
    is_candidate,
    last_use,
    leave_queue,
    move_last,
    remove_member,
    request_key,
    set_timestamp,
    smallest,
)
from moereplay.simulator.compiled.state import (
    BAD_VICTIM,
    BY_LINK,
    NEVER_LEFT,
    expert_of,
    fail,
    first_copy,
    layer_of,
    notifier,
    pool_of,
    size_of,
    taken_by,
)
from moereplay.simulator.jit.marks import called, fast

on_evict = notifier("on_evict")
on_use = notifier("on_use")

# look-up


@fast
def find(s, x, want, state):
    """Return the most precise copy of expert x in `state` that is at least as precise as `want`, or NONE."""
    first = first_copy(s, x)
    if s["precisions"] == 1:
        return first if s.copies[first]["state"] == state else NONE
    for y in range(first, first + want + 1):
        if s.copies[y]["state"] == state:
            return y
    return NONE


@fast
def find_any(s, x, state):
    """Return the most precise copy of expert x in `state`, or NONE."""
    return find(s, x, s["precisions"] - 1, state)


@fast
def reason(s, x, want):
    """Return the counter for the kind of miss, judged over all copies of x that would have satisfied `want`."""
    first = first_copy(s, x)
    latest = s.copies[first]["since"]  # none of them is resident
    if s["precisions"] > 1:
        for y in range(first + 1, first + want + 1):
            latest = max(latest, s.copies[y]["since"])
    if latest == NEVER_LEFT:
        return COMPULSORY
    return COLLISIONS if latest == s.now["pass"] else CAPACITY


@fast
def free_bytes(s, y):
    """Return the free bytes in the pool of copy y."""
    pool = s.pools[pool_of(s, y)]
    return pool["capacity"] - pool["used"]


@fast
def set_state(s, y, state):
    """Set the state of copy y: ABSENT, QUEUED, IN_FLIGHT or RESIDENT."""
    s.copies[y]["state"] = state


# use


@fast
def use(s, hooks, y):
    """Record the use of a demanded copy that is resident or in flight."""
    x = expert_of(s, y)
    count_use(s, x, y)
    if s["listeners_on_use"] != 0:
        on_use(s, hooks, y)
    s.copies[y]["prefetched"] = 0
    invalidate_expert(s, x)


@called
def use_elsewhere(s, hooks, y):
    """Record the use of an expert that the CPU runs: copy y stays out of queues, and without another is none here."""
    use(s, hooks, y)
    if s["queue"] == BY_LAST_USE:
        leave_queue(s, y)
    forget_if_gone(s, expert_of(s, y))


@fast
def use_without_events(s, x):
    """Record a use on the fast path: one copy per expert, no listeners, pinned until the step ends."""
    count_use(s, x, x)
    s.copies[x]["prefetched"] = 0
    pin_unlisted(s, x)


@fast
def forget_if_gone(s, x):
    """Clear the uses of expert x if none of its copies is resident."""
    if s["keeps_uses"] == 0:
        return
    if s["precisions"] == 1 or find_any(s, x, RESIDENT) == NONE:
        forget_uses(s, x)


# pins


@called
def pin(s, y):
    """Pin copy y until `unpin` or the end of the step."""
    if s.owned[y]["listed"] == 0:
        s.owned[y]["listed"] = 1
        s.pinned[s["cache"]["pinned_now"]] = y
        s["cache"]["pinned_now"] += 1
    pin_unlisted(s, y)


@fast
def pin_unlisted(s, y):
    """Pin copy y until `unpin`; the end of the step does not release it."""
    copy = s.copies[y]
    if copy["protected"] == 0:
        copy["protected"] = 1
        if copy["member"] == 1:
            s.pools[pool_of(s, y)]["open"] -= taken_by(s, y)
            invalidate(s, y)


@called
def keep_for_good(s):
    """Make the copies that never leave resident; they take nothing of the pools' capacity."""
    for i in range(s["n_resident"]):
        copy = s.copies[s.resident[i]]
        copy["state"], copy["protected"], s.owned[s.resident[i]]["for_good"] = RESIDENT, 1, 1


@fast
def unpin(s, y):
    copy = s.copies[y]
    if copy["protected"] == 1 and (s["n_resident"] == 0 or s.owned[y]["for_good"] == 0):
        copy["protected"] = 0
        if copy["member"] == 1:
            s.pools[pool_of(s, y)]["open"] += taken_by(s, y)
            invalidate(s, y)


@fast
def unpin_demanded(s):
    """Unpin the copies of a step's demand, one per expert: equally large, of one pool unless links have some."""
    if s["pooled"] == BY_LINK:
        for n in range(s["demand"]["demanded"]):
            unpin(s, s.demand_expert[n])
        return
    taken, members = taken_by(s, s.now["layer"] * s["experts"]), 0
    for n in range(s["demand"]["demanded"]):
        copy = s.copies[s.demand_expert[n]]
        if copy["protected"] == 1 and (s["n_resident"] == 0 or s.owned[s.demand_expert[n]]["for_good"] == 0):
            copy["protected"] = 0
            members += copy["member"]
            invalidate(s, s.demand_expert[n])
    s.pools[pool_of(s, s.now["layer"] * s["experts"])]["open"] += members * taken


@called
def show_last_resort(s, pool, protected):
    """Set `protected` of all computed copies in a pool, so that the policy's hook can choose among them."""
    for i in range(s["cache"]["done_now"]):
        y = s.done[i]
        if pool_of(s, y) == pool and s.owned[y]["aside"] == 0:
            s.copies[y]["protected"] = protected


@fast
def mark_computed(s, x, y):
    """Mark copy y as computed: it becomes evictable as a last resort, or leaves the bypass buffer."""
    clear_needed(s, x)
    if s["has_admit"] == 1 and s["cache"]["bypassed"] == y:
        s["cache"]["bypassed"] = NONE
        set_state(s, y, ABSENT)
        forget_if_gone(s, x)
    elif s.copies[y]["member"] == 1 and s.copies[y]["done"] == 0:  # a copy in a side buffer takes no bytes of the pool
        s.copies[y]["done"] = 1
        s.done[s["cache"]["done_now"]] = y
        s["cache"]["done_now"] += 1


@called
def end_step(s):
    """Unpin all copies: nothing is pinned between the start of a step and its gate."""
    for i in range(s["cache"]["pinned_now"]):
        y = s.pinned[i]
        s.owned[y]["listed"] = 0
        unpin(s, y)
    s["cache"]["pinned_now"] = 0
    forget_all_done(s)


@fast
def forget_all_done(s):
    """Clear the list of copies that are evictable as a last resort."""
    for i in range(s["cache"]["done_now"]):
        s.copies[s.done[i]]["done"] = 0
    s["cache"]["done_now"] = 0


# arrival


@fast
def enter(s, y, unused):
    """Make copy y resident. `unused`: 1 if it was prefetched and no demand has met it."""
    copy, x = s.copies[y], expert_of(s, y)
    if s["keeps_uses"] == 1:
        known = s.experts[x]["uses_here"] > 0 or (s["precisions"] > 1 and find_any(s, x, RESIDENT) != NONE)
        s.owned[y]["counted"] = 1 if unused == 1 and not known else 0
        if unused == 1 and not known:
            count_first_use(s, x)
    note_entry(s, y)
    copy["state"], copy["prefetched"], copy["since"] = RESIDENT, unused, s.now["step"]
    count(s, INSERTIONS, layer_of(s, y), 1)
    if unused == 1:
        set_timestamp(s, x)
    if s["precisions"] > 1:  # of other copies: this one has no key yet
        invalidate_expert(s, x)


@fast
def note_entry(s, y):
    """Number the entry of copy y, if a policy reads the order of entries."""
    if s["keeps_entered"] == 1:
        s["cache"]["arrivals"] += 1
        s.owned[y]["entered"] = s["cache"]["arrivals"]


@fast
def join_pool(s, y):
    """Add copy y to its pool: it is a candidate for eviction once it is not pinned."""
    copy = s.copies[y]
    copy["member"] = 1
    if copy["protected"] == 0:
        s.pools[pool_of(s, y)]["open"] += taken_by(s, y)
    if s["queue"] == BY_ENTRY:
        move_last(s, y)
    if s["ranks"] == 1:
        add_member(s, y)


@called
def warm_copy(s, y):
    """Make copy y resident before the start: unused, not prefetched and not counted."""
    note_entry(s, y)
    s.copies[y]["state"], s.copies[y]["since"] = RESIDENT, 0
    occupy(s, y)
    join_pool(s, y)


# eviction


@fast
def evict(s, hooks, y, incoming, pool):
    """Remove copy y from its pool."""
    copy, taken = s.copies[y], taken_by(s, y)
    s.pools[pool]["used"] -= taken
    copy["member"] = 0
    if copy["protected"] == 0:
        s.pools[pool]["open"] -= taken
    if s["queue"] != NO_QUEUE:
        leave_queue(s, y)
    elif s["ranks"] == 1:
        remove_member(s, y)
    if copy["done"] == 1:
        forget_done(s, y)
    leave(s, y, incoming)
    if s["listeners_on_evict"] != 0:
        on_evict(s, hooks, y)


@called
def forget_done(s, y):
    """Remove copy y from this step's list of computed copies: it may return and run again."""
    s.copies[y]["done"] = 0
    s["cache"]["done_now"] -= 1
    for i in range(s["cache"]["done_now"]):
        if s.done[i] == y:
            s.done[i] = s.done[s["cache"]["done_now"]]


@fast
def forget_evicted(s):
    """Set the number of copies that the next transfer evicts to 0."""
    s["cache"]["evicted_now"] = 0


@fast
def leave(s, y, incoming):
    """Count an eviction for the incoming expert's layer, and wasted bytes for the victim's layer."""
    copy, layer = s.copies[y], layer_of(s, y)
    count(s, EVICTIONS, layer_of(s, incoming), 1)
    lived(s, layer, s.now["step"] - copy["since"])
    if copy["prefetched"] == 1:
        count(s, BYTES_WASTED, layer, size_of(s, y))
    if s["victim_ns"] > 0:
        s["cache"]["evicted_now"] += 1
    copy["state"], copy["protected"], copy["prefetched"], copy["since"] = ABSENT, 0, 0, s.now["pass"]
    forget_if_gone(s, expert_of(s, y))
    note(s, IS_EVICT, y, incoming)


# reset


@called
def clear_cache(s):
    """Empty the cache and forget its history."""
    for y in range(s["n_copies"]):
        copy, mine = s.copies[y], s.owned[y]
        copy["state"], copy["protected"], copy["prefetched"], copy["since"] = ABSENT, 0, 0, NEVER_LEFT
        copy["member"], copy["done"], mine["entered"], mine["listed"], mine["side"] = 0, 0, 0, 0, 0
    for pool in range(s["n_pools"]):
        s.pools[pool]["used"], s.pools[pool]["open"] = 0, 0
    cache = s["cache"]
    cache["pinned_now"], cache["done_now"], cache["arrivals"] = 0, 0, 0
    cache["bypassed"], s["side_buffer"]["in_side"] = NONE, 0


# Victim selection and space in a pool: whether evictions can free enough, and whether the policy admits a copy.

GRANTED, BYPASSED, REFUSED = range(3)
#: State of a victim before it was set aside: a candidate, or evictable as a last resort.
WAS_CANDIDATE, WAS_LAST_RESORT = 1, 2


@fast
def reserve(s, hooks, y, prefetch):
    """Reserve the bytes of copy y in its pool, with evictions, if that is possible and the policy admits y.

    `prefetch`: 1 if no demand waits for y.
    """
    pool, size = pool_of(s, y), taken_by(s, y)
    bytes_of = s.pools[pool]
    short = bytes_of["used"] + size - bytes_of["capacity"]
    if short <= 0:
        bytes_of["used"] += size
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
        if s["has_admit"] == 1 and not agreed and not hooks.admit(s, y, prefetch, victim):
            return rejected(s, prefetch)
        agreed = True
        evict(s, hooks, victim, y, pool)
    bytes_of["used"] += size
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
    """Do what `reserve` does, but decide on admission before the first eviction, so that hooks see unchanged tables."""
    bytes_of = s.pools[pool_of(s, y)]
    short = bytes_of["used"] + taken_by(s, y) - bytes_of["capacity"]
    verdict, s["space"]["aside_now"] = GRANTED, 0
    while verdict == GRANTED and short > 0:
        victim = choose_victim(s, hooks, pool_of(s, y), y)
        if victim == NONE:
            verdict = REFUSED  # an error is set
        elif not hooks.admit(s, y, prefetch, victim):
            verdict = rejected(s, prefetch)
        else:
            short -= taken_by(s, victim)
            set_aside(s, victim, short > 0)
    restore_candidates(s)
    if verdict == GRANTED:
        for i in range(s["space"]["aside_now"]):
            evict(s, hooks, s.chosen_victims[i], y, pool_of(s, y))
        occupy(s, y)
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
        y = following(s, s["n_copies"] + pool)
        while s.copies[y]["protected"] == 1:
            y = following(s, y)
        return y
    return smallest(s, keys, pool)


@called
def victim_of_policy(s, hook, pool, y):
    """Return the policy's victim; NONE, and end the run, if it is not a candidate of the pool."""
    victim = hook(s, pool, y)
    if 0 <= victim < s["n_copies"] and pool_of(s, victim) == pool and is_candidate(s, victim):
        return victim
    fail(s, BAD_VICTIM, victim)
    return NONE


# last resort: copies whose compute has ended in this step


@fast
def is_last_resort(s, y, pool):
    """Return whether copy y is demanded by this step, computed and not set aside: only a demand may evict it."""
    protected = s.copies[y]["protected"] == 1 and s.owned[y]["aside"] == 0
    return protected and pool_of(s, y) == pool


@called
def last_resort_suffices(s, pool, short):
    """Return whether last-resort copies hold at least `short` bytes."""
    for i in range(s["cache"]["done_now"]):
        if short <= 0:
            return True
        if is_last_resort(s, s.done[i], pool):
            short -= taken_by(s, s.done[i])
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
    ours, theirs = last_use(s, a), last_use(s, b)
    return ours < theirs or (ours == theirs and a < b)


# Transfers from the cache's side: reserve bytes at the start, make copies resident at the end; and side buffers.
#
# Prefetches into side buffers never evict a cached copy.

on_insert = notifier("on_insert")


@fast
def claim(s, hooks, y):
    """Reserve the bytes of a transfer that is about to start, with evictions."""
    is_prefetch = s.copies[y]["prefetch"]
    if is_prefetch == 1 and s["side_slots"] > 0:
        return claim_side(s, y)
    claimed = reserve(s, hooks, y, is_prefetch)
    if claimed == GRANTED:
        set_state(s, y, IN_FLIGHT)
    elif s["has_admit"] == 1 and claimed == BYPASSED:
        s["cache"]["bypassed"] = y
        set_state(s, y, IN_FLIGHT)
        count(s, DECLINED, layer_of(s, y), 1)
    return claimed


@fast
def occupy(s, y):
    """Reserve the bytes of copy y in its pool."""
    s.pools[pool_of(s, y)]["used"] += taken_by(s, y)


@fast
def land(s, hooks, y):
    """Complete a transfer: make the copy resident unless it bypasses the cache."""
    copy = s.copies[y]
    if s["has_admit"] == 1 and s.owned[y]["bypasses"] == 1:
        return
    unused = 1 if copy["prefetch"] == 1 and copy["awaited"] == 0 else 0
    enter(s, y, unused)
    if s["side_slots"] > 0 and s.owned[y]["side"] == 1:
        if copy["awaited"] == 1:
            promote(s, hooks, y)
        return
    join_pool(s, y)
    if s["listeners_on_insert"] != 0:
        on_insert(s, hooks, y, unused)


# side buffers: prefetches go there and never evict a cached copy


@called
def claim_side(s, y):
    """Reserve a free side buffer, or the oldest that may be overwritten."""
    if s["side_buffer"]["in_side"] >= s["side_slots"]:
        stale = overwritable(s)
        if stale == NONE:
            return REFUSED
        take(s, stale)
        leave(s, stale, y)
    s.buffered[s["side_buffer"]["in_side"]] = y
    s["side_buffer"]["in_side"] += 1
    s.owned[y]["side"] = 1
    set_state(s, y, IN_FLIGHT)
    return GRANTED


@called
def overwritable(s):
    """Return the oldest copy in a side buffer whose gate has passed and that is not pinned, or NONE."""
    for i in range(s["side_buffer"]["in_side"]):
        y = s.buffered[i]
        target, step = s.copies[y]["target"], s.now["step"]
        passed = target < step or (target == step and s.now["gated"] == 1)
        if passed and s.copies[y]["state"] == RESIDENT and s.copies[y]["protected"] == 0:
            return y
    return NONE


@called
def take(s, y):
    """Free the side buffer of copy y; the others keep their order."""
    kept = 0
    for i in range(s["side_buffer"]["in_side"]):
        held = s.buffered[i]
        s.buffered[kept] = held
        if held != y:
            kept += 1
    s["side_buffer"]["in_side"] = kept
    s.owned[y]["side"] = 0


@called
def promote(s, hooks, y):
    """Move a demanded copy from its side buffer into the cache, if there is space; no bytes cross the link."""
    if reserve(s, hooks, y, 0) != GRANTED:
        return
    take(s, y)
    note_entry(s, y)  # the order of arrival in the cache itself
    join_pool(s, y)
    invalidate_expert(s, expert_of(s, y))
    note(s, IS_PROMOTE, y, BY_DEMAND)
    if s["listeners_on_insert"] != 0:
        on_insert(s, hooks, y, 0)
