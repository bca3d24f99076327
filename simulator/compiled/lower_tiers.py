"""The tiers below the fast tier: their copies and evictions, in bytes without time.

A copy is held from the queueing of its transfer until it has crossed the link; held copies are not evicted. The least
recently read copy is evicted first. `tier` is a row of `lower`; the slow tier has no row and holds every copy.
"""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.state import copies, held, is_there, newer, older, owned
from moereplay.simulator.jit.marks import called, fast


@fast
def cell(s, tier, y):
    """Return the index of a copy in the tiers' arrays."""
    return tier * s["n_copies"] + y


@called
def highest(s, y):
    """Return the highest tier that holds a copy."""
    tier = 0
    while tier < s["n_tiers"] and is_there(s)[cell(s, tier, y)] == 0:
        tier += 1
    return tier


@called
def hold(s, tier, y):
    """Protect copy y while its transfer up is queued."""
    if tier < s["n_tiers"]:
        held(s)[cell(s, tier, y)] = 1
        s["lower"][tier]["held_bytes"] += copies(s)[y]["bytes"]


@called
def release(s, tier, y):
    """Release copy y: it has crossed the link, or will not."""
    if tier < s["n_tiers"]:
        held(s)[cell(s, tier, y)] = 0
        s["lower"][tier]["held_bytes"] -= copies(s)[y]["bytes"]


@called
def read(s, tier, y):
    """Make copy y the most recently read."""
    if tier < s["n_tiers"]:
        take_out(s, tier, y)
        put_last(s, tier, y)


@called
def claim_lower(s, tier, y):
    """Reserve space for a transfer that is about to start, with evictions.

    Return False, and evict nothing, if there is not enough.
    """
    mine, size = s["lower"][tier], copies(s)[y]["bytes"]
    evictable = mine["complete"] - mine["held_bytes"]  # held copies stay until they have crossed the link
    if mine["used"] + size - evictable > mine["capacity"]:
        return False
    victim = mine["oldest"]
    while mine["used"] + size > mine["capacity"]:
        following = newer(s)[cell(s, tier, victim)]
        if held(s)[cell(s, tier, victim)] == 0:
            drop_copy(s, tier, victim)
        victim = following
    mine["used"] += size
    owned(s)[y]["coming"], owned(s)[y]["onward"] = 1, 1
    return True


@called
def drop_copy(s, tier, y):
    """Remove copy y from the tier."""
    take_out(s, tier, y)
    is_there(s)[cell(s, tier, y)] = 0
    s["lower"][tier]["used"] -= copies(s)[y]["bytes"]
    s["lower"][tier]["complete"] -= copies(s)[y]["bytes"]


@called
def fill(s, tier, y):
    """Complete a transfer into the tier; return whether it continues upwards."""
    is_there(s)[cell(s, tier, y)] = 1
    s["lower"][tier]["complete"] += copies(s)[y]["bytes"]
    put_last(s, tier, y)
    owned(s)[y]["coming"] = 0
    return owned(s)[y]["onward"] == 1


@fast
def continue_up(s, y):
    """Let a transfer into a lower tier continue upwards."""
    owned(s)[y]["onward"] = 1


@fast
def end_in_tier(s, y):
    """End a transfer in the lower tier that it is on its way into."""
    owned(s)[y]["onward"] = 0


# the list of copies, least recently read first


@called
def put_last(s, tier, y):
    """Append copy y to the list."""
    mine, at = s["lower"][tier], cell(s, tier, y)
    newer(s)[at], older(s)[at] = NONE, mine["newest"]
    if mine["newest"] == NONE:
        mine["oldest"] = y
    else:
        newer(s)[cell(s, tier, mine["newest"])] = y
    mine["newest"] = y


@called
def take_out(s, tier, y):
    """Remove copy y from the list."""
    mine, before, after = s["lower"][tier], older(s)[cell(s, tier, y)], newer(s)[cell(s, tier, y)]
    if before == NONE:
        mine["oldest"] = after
    else:
        newer(s)[cell(s, tier, before)] = after
    if after == NONE:
        mine["newest"] = before
    else:
        older(s)[cell(s, tier, after)] = before


@called
def clear_lower(s):
    """Empty the tiers and abandon their transfers."""
    for tier in range(s["n_tiers"]):
        mine = s["lower"][tier]
        mine["used"], mine["complete"], mine["held_bytes"] = 0, 0, 0
        mine["oldest"], mine["newest"] = NONE, NONE
        for y in range(s["n_copies"]):
            is_there(s)[cell(s, tier, y)], held(s)[cell(s, tier, y)] = 0, 0
    for y in range(s["n_copies"]):
        owned(s)[y]["coming"] = 0
