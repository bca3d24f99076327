"""The fast tier: states of copies, uses, pins, arrivals and evictions."""

from __future__ import annotations

from moereplay.policies.contract import ABSENT, IN_FLIGHT, NONE, RESIDENT
from moereplay.simulator.compiled.counters import (
    BYTES_WASTED,
    CAPACITY,
    COLLISIONS,
    COMPULSORY,
    EVICTIONS,
    INSERTIONS,
    IS_EVICT,
    count,
    lived,
    note,
)
from moereplay.simulator.compiled.ranking import (
    BY_ENTRY,
    BY_LAST_USE,
    NO_QUEUE,
    add_member,
    invalidate,
    invalidate_expert,
    leave_queue,
    move_last,
    remove_member,
)
from moereplay.simulator.compiled.state import (
    NEVER_LEFT,
    expert_of,
    layer_of,
    notifier,
    pool_of,
)
from moereplay.simulator.compiled.uses import clear_needed, count_first_use, count_use, forget_uses, set_timestamp
from moereplay.simulator.jit.marks import called, fast

on_evict = notifier("on_evict")
on_use = notifier("on_use")

# look-up


@fast
def find(s, x, want, state):
    """Return the most precise copy of expert x in `state` that is at least as precise as `want`, or NONE."""
    first = x * s["precisions"]
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
    first, ever, latest = x * s["precisions"], False, NEVER_LEFT
    for y in range(first, first + want + 1):
        ever = ever or s.owned[y]["ever"] == 1
        latest = max(latest, s.owned[y]["evicted_pass"])
    if not ever:
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
    count_use(s, x, s.copies[y]["prefetched"] * s.owned[y]["counted"])
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
    count_use(s, x, s.copies[x]["prefetched"] * s.owned[x]["counted"])
    s.copies[x]["prefetched"] = 0
    pin_unlisted(s, x)


@fast
def forget_if_gone(s, x):
    """Clear the uses of expert x if none of its copies is resident."""
    if s["precisions"] == 1 or find_any(s, x, RESIDENT) == NONE:
        forget_uses(s, x)


# pins


@called
def pin(s, y):
    """Pin copy y until `unpin` or the end of the step."""
    mine = s.owned[y]
    if mine["listed"] == 0:
        mine["listed"] = 1
        s.pinned[s["cache"]["pinned_now"]] = y
        s["cache"]["pinned_now"] += 1
    pin_unlisted(s, y)


@fast
def pin_unlisted(s, y):
    """Pin copy y until `unpin`; the end of the step does not release it."""
    copy = s.copies[y]
    if copy["protected"] == 0:
        copy["protected"] = 1
        if s.owned[y]["member"] == 1:
            s.pools[pool_of(s, y)]["open"] -= copy["bytes"]
            invalidate(s, y)


@fast
def is_for_good(s, y):
    """Return whether copy y never leaves."""
    return s["n_resident"] > 0 and s.owned[y]["for_good"] == 1


@called
def keep_for_good(s):
    """Make the copies that never leave resident; they take nothing of the pools' capacity."""
    for i in range(s["n_resident"]):
        copy, mine = s.copies[s.resident[i]], s.owned[s.resident[i]]
        copy["state"], copy["protected"], mine["ever"], mine["for_good"] = RESIDENT, 1, 1, 1


@fast
def unpin(s, y):
    copy = s.copies[y]
    if copy["protected"] == 1 and not is_for_good(s, y):
        copy["protected"] = 0
        if s.owned[y]["member"] == 1:
            s.pools[pool_of(s, y)]["open"] += copy["bytes"]
            invalidate(s, y)


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
    elif s.owned[y]["member"] == 1 and s.owned[y]["done"] == 0:  # a copy in a side buffer takes no bytes of the pool
        s.owned[y]["done"] = 1
        s.done[s["cache"]["done_now"]] = y
        s["cache"]["done_now"] += 1


@fast
def unpin_demanded(s):
    """Unpin the step's demand on the fast path: `end_step` for copies of `use_without_events`."""
    for n in range(s["demand"]["demanded"]):
        unpin(s, s.demand_expert[n])
    forget_all_done(s)


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
        s.owned[s.done[i]]["done"] = 0
    s["cache"]["done_now"] = 0


# arrival


@fast
def occupy(s, y):
    """Reserve the bytes of copy y when its transfer starts."""
    s.pools[pool_of(s, y)]["used"] += s.copies[y]["bytes"]
    set_state(s, y, IN_FLIGHT)


@called
def bypass(s, y):
    """Direct the transfer of a rejected copy to the bypass buffer."""
    s["cache"]["bypassed"] = y
    set_state(s, y, IN_FLIGHT)


@fast
def enter(s, y, unused):
    """Make copy y resident. `unused`: 1 if it was prefetched and no demand has met it."""
    mine, copy, x = s.owned[y], s.copies[y], expert_of(s, y)
    known = s.experts[x]["uses_here"] > 0 or (s["precisions"] > 1 and find_any(s, x, RESIDENT) != NONE)
    s["cache"]["arrivals"] += 1
    copy["state"], copy["entered"], copy["prefetched"] = RESIDENT, s["cache"]["arrivals"], unused
    mine["counted"] = 1 if unused == 1 and not known else 0
    mine["entered_step"], mine["ever"] = s.now["step"], 1
    count(s, INSERTIONS, layer_of(s, y), 1)
    if unused == 1:
        set_timestamp(s, x)
    if mine["counted"] == 1:
        count_first_use(s, x)
    invalidate_expert(s, x)


@fast
def join_pool(s, y):
    """Add copy y to its pool: it is a candidate for eviction once it is not pinned."""
    copy = s.copies[y]
    s.owned[y]["member"] = 1
    if copy["protected"] == 0:
        s.pools[pool_of(s, y)]["open"] += copy["bytes"]
    if s["queue"] == BY_ENTRY:
        move_last(s, y)
    if s["ranks"] == 1:
        add_member(s, y)


@called
def move_in(s, y):
    """Move a resident copy from its side buffer into its pool."""
    s.pools[pool_of(s, y)]["used"] += s.copies[y]["bytes"]
    s["cache"]["arrivals"] += 1
    s.copies[y]["entered"] = s["cache"]["arrivals"]  # the order of arrival in the cache itself
    join_pool(s, y)
    invalidate_expert(s, expert_of(s, y))


@called
def warm_copy(s, y):
    """Make copy y resident before the start: unused, not prefetched and not counted."""
    copy = s.copies[y]
    s["cache"]["arrivals"] += 1
    copy["state"], copy["entered"] = RESIDENT, s["cache"]["arrivals"]
    s.owned[y]["ever"] = 1
    s.pools[pool_of(s, y)]["used"] += copy["bytes"]
    join_pool(s, y)


# eviction


@fast
def evict(s, hooks, y, incoming):
    """Remove copy y from its pool."""
    copy, mine = s.copies[y], s.owned[y]
    s.pools[pool_of(s, y)]["used"] -= copy["bytes"]
    mine["member"] = 0
    if copy["protected"] == 0:
        s.pools[pool_of(s, y)]["open"] -= copy["bytes"]
    if s["queue"] != NO_QUEUE:
        leave_queue(s, y)
    elif s["ranks"] == 1:
        remove_member(s, y)
    if mine["done"] == 1:
        forget_done(s, y)
    leave(s, y, incoming)
    if s["listeners_on_evict"] != 0:
        on_evict(s, hooks, y)


@called
def forget_done(s, y):
    """Remove copy y from this step's list of computed copies: it may return and run again."""
    s.owned[y]["done"] = 0
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
    copy, mine = s.copies[y], s.owned[y]
    layer = layer_of(s, y)
    count(s, EVICTIONS, layer_of(s, incoming), 1)
    lived(s, layer, s.now["step"] - mine["entered_step"])
    if copy["prefetched"] == 1:
        count(s, BYTES_WASTED, layer, copy["bytes"])
    if s["victim_ns"] > 0:
        s["cache"]["evicted_now"] += 1
    copy["state"], copy["protected"], copy["prefetched"] = ABSENT, 0, 0
    forget_if_gone(s, expert_of(s, y))
    mine["evicted_pass"] = s.now["pass"]
    note(s, IS_EVICT, y, incoming)


# reset


@called
def clear_cache(s):
    """Empty the cache and forget its history."""
    for y in range(s["n_copies"]):
        copy, mine = s.copies[y], s.owned[y]
        copy["state"], copy["protected"], copy["entered"], copy["prefetched"] = ABSENT, 0, 0, 0
        mine["evicted_pass"], mine["entered_step"] = NEVER_LEFT, 0
        mine["member"], mine["listed"], mine["done"], mine["ever"] = 0, 0, 0, 0
    for pool in range(s["n_pools"]):
        s.pools[pool]["used"], s.pools[pool]["open"] = 0, 0
    cache = s["cache"]
    cache["pinned_now"], cache["done_now"], cache["arrivals"] = 0, 0, 0
    cache["bypassed"] = NONE
