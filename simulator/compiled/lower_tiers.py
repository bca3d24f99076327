"""The tiers below the fast tier: their copies and evictions, in bytes without time.

A copy is held from the queueing of its transfer until it has crossed the link, and while the CPU reads it; held copies
are not evicted. The least recently read copy is evicted first, or the first that came if the
tier says so. `tier` is a row of `lower`; the slow tier has no row and holds every copy.
"""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.jit.marks import called, fast

#: A copy is not on its way into a tier, or it is and stays there, goes on up, or goes on to where the CPU reads.
NOT_COMING, STAYS, GOES_ON, GOES_TO_CPU = range(4)
#: `owned.for_cpu`: nothing comes for the CPU, a copy comes, or a prefetch goes on from where it will lie.
NO_CPU_WAITS, CPU_WAITS, PREFETCH_WAITS = range(3)


@fast
def cell(s, tier, y):
    """Return the index of a copy in the tiers' arrays."""
    return tier * s["n_copies"] + y


@called
def highest(s, first, y):
    """Return the highest tier from `first` on that holds a copy, or that it is on its way into."""
    tier = first
    while tier < s["n_tiers"] and s.is_there[cell(s, tier, y)] == 0 and s.coming[cell(s, tier, y)] == NOT_COMING:
        tier += 1
    return tier


@called
def hold(s, tier, y):
    """Protect copy y while its transfer up is queued, or while the CPU reads it."""
    if tier < s["n_tiers"]:
        s.held[cell(s, tier, y)] += 1
        if s.held[cell(s, tier, y)] == 1:
            s["lower"][tier]["held_bytes"] += s.copies[y]["bytes"]


@called
def release(s, tier, y):
    """Release copy y: it has crossed the link, or will not, or the CPU has read it."""
    if tier < s["n_tiers"]:
        s.held[cell(s, tier, y)] -= 1
        if s.held[cell(s, tier, y)] == 0:
            s["lower"][tier]["held_bytes"] -= s.copies[y]["bytes"]


@called
def read(s, tier, y):
    """Make copy y the most recently read, unless the tier evicts what came first."""
    if tier < s["n_tiers"] and s["lower"][tier]["fifo"] == 0:
        take_out(s, tier, y)
        put_last(s, tier, y)


@called
def claim_lower(s, tier, y, onward):
    """Reserve space for a transfer that is about to start, with evictions; `onward`: what goes on from the tier.

    Return False, and evict nothing, if there is not enough.
    """
    mine, size = s["lower"][tier], s.copies[y]["bytes"]
    evictable = mine["complete"] - mine["held_bytes"]  # held copies stay until they have crossed the link
    if mine["used"] + size - evictable > mine["capacity"]:
        return False
    victim = mine["oldest"]
    while mine["used"] + size > mine["capacity"]:
        following = s.newer[cell(s, tier, victim)]
        if s.held[cell(s, tier, victim)] == 0:
            drop_copy(s, tier, victim)
        victim = following
    mine["used"] += size
    s.coming[cell(s, tier, y)] = onward
    return True


@called
def drop_copy(s, tier, y):
    """Remove copy y from the tier."""
    take_out(s, tier, y)
    s.is_there[cell(s, tier, y)] = 0
    s["lower"][tier]["used"] -= s.copies[y]["bytes"]
    s["lower"][tier]["complete"] -= s.copies[y]["bytes"]


@called
def fill(s, tier, y):
    """Complete a transfer into the tier; return what goes on from there."""
    s.is_there[cell(s, tier, y)] = 1
    s["lower"][tier]["complete"] += s.copies[y]["bytes"]
    put_last(s, tier, y)
    onward = s.coming[cell(s, tier, y)]
    s.coming[cell(s, tier, y)] = NOT_COMING
    return onward


@fast
def set_onward(s, tier, y, onward):
    """Set what goes on from a tier that copy y is on its way into."""
    s.coming[cell(s, tier, y)] = onward


@fast
def set_for_cpu(s, y, waits):
    """Set whether copy y comes for the CPU, and whether a prefetch goes on from there."""
    s.owned[y]["for_cpu"] = waits


# entries of queues: a copy, or a copy that comes for the CPU


@fast
def entry_for_cpu(s, y):
    """Return the entry of copy y on its way to the CPU's tier; a prefetch of the copy may move at the same time."""
    return y + s["n_copies"]


@fast
def is_for_cpu(s, entry):
    """Return whether an entry is on its way to where the CPU reads."""
    return s["cpu_tier"] > 0 and entry >= s["n_copies"]


@fast
def copy_of(s, entry):
    """Return the copy of an entry."""
    return entry - s["n_copies"] if is_for_cpu(s, entry) else entry


@fast
def is_prefetch(s, entry):
    """Return whether an entry is a prefetch."""
    return not is_for_cpu(s, entry) and s.owned[entry]["prefetch"] == 1


# the list of copies, least recently read first


@called
def put_last(s, tier, y):
    """Append copy y to the list."""
    mine, at = s["lower"][tier], cell(s, tier, y)
    s.newer[at], s.older[at] = NONE, mine["newest"]
    if mine["newest"] == NONE:
        mine["oldest"] = y
    else:
        s.newer[cell(s, tier, mine["newest"])] = y
    mine["newest"] = y


@called
def take_out(s, tier, y):
    """Remove copy y from the list."""
    mine, before, after = s["lower"][tier], s.older[cell(s, tier, y)], s.newer[cell(s, tier, y)]
    if before == NONE:
        mine["oldest"] = after
    else:
        s.newer[cell(s, tier, before)] = after
    if after == NONE:
        mine["newest"] = before
    else:
        s.older[cell(s, tier, after)] = before


# what the CPU waits for


@fast
def note_arrival(s, y, behind):
    """Note that a copy has come where the CPU reads; `behind`: whether a prefetch goes on from there."""
    s["arrival"]["y"], s["arrival"]["behind"] = y, 1 if behind else 0


@fast
def has_come_for_cpu(s):
    """Return whether a copy has just come where the CPU reads."""
    return s["cpu_tier"] > 0 and s["arrival"]["y"] != NONE


@fast
def take_arrival(s):
    """Return the copy that has just come, and forget it."""
    y = s["arrival"]["y"]
    s["arrival"]["y"] = NONE
    return y


@called
def clear_lower(s):
    """Empty the tiers and abandon their transfers."""
    for tier in range(s["n_tiers"]):
        mine = s["lower"][tier]
        mine["used"], mine["complete"], mine["held_bytes"] = 0, 0, 0
        mine["oldest"], mine["newest"] = NONE, NONE
        for y in range(s["n_copies"]):
            s.is_there[cell(s, tier, y)], s.held[cell(s, tier, y)] = 0, 0
            s.coming[cell(s, tier, y)] = NOT_COMING
    for y in range(s["n_copies"]):
        s.owned[y]["for_cpu"] = NO_CPU_WAITS
