"""The tiers below the fast one: what they hold, and what is evicted there. They know bytes, not time.

A copy is held in a tier from when its transfer up from there is queued until it has crossed the link: it may not be
evicted. What was read, or came in, longest ago is evicted. `tier` is a row of `lower`; the slow tier, which comes after
them, is none of them and has everything.
"""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.state import copies, held, is_there, newer, older, owned
from moereplay.simulator.jit.marks import called, fast


@fast
def cell(s, tier, y):
    """The index of a copy in the arrays of the tiers."""
    return tier * s["n_copies"] + y


@called
def highest(s, y):
    """The highest tier that has a copy."""
    tier = 0
    while tier < s["n_tiers"] and is_there(s)[cell(s, tier, y)] == 0:
        tier += 1
    return tier


@called
def hold(s, tier, y):
    """Its transfer up is queued."""
    if tier < s["n_tiers"]:
        held(s)[cell(s, tier, y)] = 1
        s["lower"][tier]["held_bytes"] += copies(s)[y]["bytes"]


@called
def release(s, tier, y):
    """It has crossed the link, or will not."""
    if tier < s["n_tiers"]:
        held(s)[cell(s, tier, y)] = 0
        s["lower"][tier]["held_bytes"] -= copies(s)[y]["bytes"]


@called
def read(s, tier, y):
    """It starts to cross the link: the last to be evicted."""
    if tier < s["n_tiers"]:
        take_out(s, tier, y)
        put_last(s, tier, y)


@called
def claim_lower(s, tier, y):
    """Take the bytes of a transfer that is about to start, evicting what must leave; False, and nothing leaves, if
    that is not enough."""
    mine, size = s["lower"][tier], copies(s)[y]["bytes"]
    if mine["used"] + size - evictable(s, tier) > mine["capacity"]:
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
def evictable(s, tier):
    """Bytes of the copies that are complete and not held."""
    mine = s["lower"][tier]
    return mine["complete"] - mine["held_bytes"]


@called
def drop_copy(s, tier, y):
    """Out of the tier."""
    take_out(s, tier, y)
    is_there(s)[cell(s, tier, y)] = 0
    s["lower"][tier]["used"] -= copies(s)[y]["bytes"]
    s["lower"][tier]["complete"] -= copies(s)[y]["bytes"]


@called
def fill(s, tier, y):
    """A transfer into the tier is complete; returns whether it goes on."""
    is_there(s)[cell(s, tier, y)] = 1
    s["lower"][tier]["complete"] += copies(s)[y]["bytes"]
    put_last(s, tier, y)
    owned(s)[y]["coming"] = 0
    return owned(s)[y]["onward"] == 1


@fast
def goes_on(s, y):
    """A copy that is under way into a lower tier goes on with the transfer that was queued for it last."""
    owned(s)[y]["onward"] = 1


@fast
def goes_no_further(s, y):
    """It stays in the tier that it is under way into."""
    owned(s)[y]["onward"] = 0


# the list, from the longest unread to the last read


@called
def put_last(s, tier, y):
    """Behind all others."""
    mine, at = s["lower"][tier], cell(s, tier, y)
    newer(s)[at], older(s)[at] = NONE, mine["newest"]
    if mine["newest"] == NONE:
        mine["oldest"] = y
    else:
        newer(s)[cell(s, tier, mine["newest"])] = y
    mine["newest"] = y


@called
def take_out(s, tier, y):
    """The others keep their order."""
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
    """Empty, and nothing is on its way."""
    for tier in range(s["n_tiers"]):
        mine = s["lower"][tier]
        mine["used"], mine["complete"], mine["held_bytes"] = 0, 0, 0
        mine["oldest"], mine["newest"] = NONE, NONE
        for y in range(s["n_copies"]):
            is_there(s)[cell(s, tier, y)], held(s)[cell(s, tier, y)] = 0, 0
    for y in range(s["n_copies"]):
        owned(s)[y]["coming"] = 0
