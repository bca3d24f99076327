"""All links. A transfer crosses one link after the other, from the highest tier that holds the copy to the fast tier.

Every expert has one home link into the fast tier. Links that act at the same time act in the order of their rows.
"""

from __future__ import annotations

from moereplay.simulator.compiled.batches import clear_batches, land_by_matrix, start_by_matrix
from moereplay.simulator.compiled.clock import resume
from moereplay.simulator.compiled.counters import (
    IS_CANCEL,
    PREFETCH_CANCELLED,
    PREFETCH_ISSUED,
    count,
)
from moereplay.simulator.compiled.link import (
    abandon,
    any_announced,
    awaits_piece,
    cancel_on,
    clear_link,
    demand_waits,
    enqueue,
    first_fill,
    forget_bypasses,
    is_busy,
    is_moving,
    landing,
    notify_arrival,
    place,
    prefetch_waits,
    push,
    set_target,
    start_on,
    take_announced,
    take_landed,
    take_piece,
    tier_below,
)
from moereplay.simulator.compiled.lower_tiers import (
    clear_lower,
    continue_up,
    end_in_tier,
    fill,
    highest,
    hold,
    release,
)
from moereplay.simulator.compiled.state import (
    flight,
    home_of,
    layer_of,
    owned,
    to_load,
)
from moereplay.simulator.compiled.transfers import land
from moereplay.simulator.jit.marks import called, fast


@fast
def fetch(s, y):
    """Queue a demand behind other demands and ahead of all prefetches."""
    enqueue(s, y, 0)
    send_up(s, y, 0)


@fast
def fetch_announced(s, y):
    """Queue a demand that was announced."""
    take_announced(s)
    fetch(s, y)


@fast
def prefetch(s, y, target):
    """Queue a prefetch behind older ones."""
    enqueue(s, y, 1)
    set_target(s, y, target)
    count(s, PREFETCH_ISSUED, layer_of(s, y), 1)
    if s["loads_prefetches"] == 1:
        to_load(s)[s["preloads"]["end"]] = y
        s["preloads"]["end"] += 1
    else:
        send_up(s, y, 1)


@fast
def any_to_load(s):
    """Return whether compute has prefetches to load. The list is emptied with its last one."""
    return s["loads_prefetches"] == 1 and s["preloads"]["first"] < s["preloads"]["end"]


@fast
def first_to_load(s):
    """Return the prefetch that compute loads next."""
    return to_load(s)[s["preloads"]["first"]]


@called
def prefetch_loaded(s):
    """Queue the prefetch that compute has loaded."""
    y = first_to_load(s)
    s["preloads"]["first"] += 1
    if s["preloads"]["first"] == s["preloads"]["end"]:
        s["preloads"]["first"], s["preloads"]["end"] = 0, 0
    send_up(s, y, 1)


@fast
def send_up(s, y, is_prefetch):
    """Queue copy y on the next link of its path, or let a transfer into a lower tier continue."""
    if s["n_tiers"] == 0:
        push(s, home_of(s, y), y, is_prefetch)
    elif owned(s)[y]["coming"] == 1:
        continue_up(s, y)
    else:
        tier = highest(s, y)
        hold(s, tier, y)
        push(s, home_of(s, y) if tier == 0 else first_fill(s) + tier - 1, y, is_prefetch)


@fast
def cancel(s, step):
    """Cancel prefetches for this step or an earlier one that have not started into the fast tier."""
    for link in range(s["n_links"]):
        cancel_on(s, link, step)
    if s["n_tiers"] > 0:
        for link in range(first_fill(s), s["n_links"]):
            stop_fills(s, link, step)


@called
def stop_fills(s, link, step):
    """End prefetches for this step or an earlier one in the lower tier that they are on their way into."""
    for at in range(s["links"][link]["flight_first"], s["links"][link]["flight_end"]):
        y = flight(s)[place(s, link, at)]
        mine = owned(s)[y]
        if mine["onward"] == 1 and mine["prefetch"] == 1 and mine["target"] <= step:
            end_in_tier(s, y)
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)


@fast
def start_transfers(s, hooks):
    """Start every transfer that can start now."""
    for link in range(s["n_links"]):
        if s["by_matrix"] == 1:
            start_by_matrix(s, hooks, link)
        else:
            start_on(s, hooks, link)


@fast
def next_landing(s):
    """Return when the next transfer completes, or its first piece arrives, ns."""
    return landing(s, next_to_land(s))


@fast
def next_to_land(s):
    """Return the link whose transfer completes next."""
    if s["n_links"] == 1:
        return 0
    next_one = 0
    for link in range(1, s["n_links"]):
        if landing(s, link) < landing(s, next_one):
            next_one = link
    return next_one


@fast
def complete(s, hooks):
    """Process a LINK event: make the copy resident, and resume compute if it waits. The caller wakes the links."""
    link = next_to_land(s)
    if s["by_matrix"] == 1:
        land_by_matrix(s, hooks, link)
        return
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        land_piece(s, link)
        return
    piece_was_here = s["has_pieces"] == 1 and s["links"][link]["pieced"] == 1
    y = take_landed(s, link)
    if s["n_tiers"] > 0:
        release(s, tier_below(s, link), y)
    if s["n_tiers"] > 0 and link >= first_fill(s):
        promote_to_next_tier(s, y, fill(s, link - first_fill(s), y))
    else:
        land(s, hooks, y)
        if not piece_was_here and is_awaited(s, y):
            notify_arrival(s, y)
            resume(s)
    if s["waits_for_all"] == 1:  # compute also waits for the last arrival
        resume(s)


@fast
def is_awaited(s, y):
    """Return whether compute waits, or will wait, for the transfer of copy y."""
    return owned(s)[y]["prefetch"] == 0 or owned(s)[y]["awaited"] == 1


@called
def land_piece(s, link):
    """Process the arrival of a first piece: resume compute as if the transfer were complete."""
    y = take_piece(s, link)
    if is_awaited(s, y):
        notify_arrival(s, y)
        resume(s)


@called
def promote_to_next_tier(s, y, onward):
    """Continue the transfer of a copy from the lower tier that it has reached, if `onward`."""
    if onward:
        send_up(s, y, owned(s)[y]["prefetch"])


@fast
def any_link_is_busy(s):
    """Return whether a transfer is in flight, or a demand is queued or announced."""
    if any_announced(s):
        return True
    for link in range(s["n_links"]):
        if is_busy(s, link):
            return True
    return False


@called
def any_in_flight(s):
    """Return whether a transfer is in flight."""
    for link in range(s["n_links"]):
        if is_moving(s, link):
            return True
    return False


@fast
def prefetches_wait(s):
    """Return whether a prefetch waits to start, or may be on its way into a lower tier."""
    if s["n_tiers"] > 0:
        return True  # `cancel` looks for them itself
    for link in range(s["n_links"]):
        if prefetch_waits(s, link):
            return True
    return False


@fast
def nothing_queued(s):
    """Return whether no transfer waits to start."""
    for link in range(s["n_links"]):
        if demand_waits(s, link) or prefetch_waits(s, link):
            return False
    return True


@called
def clear_links(s):
    """Empty all queues, abandon all transfers and empty the lower tiers."""
    for link in range(s["n_links"]):
        clear_link(s, link)
        if s["by_matrix"] == 1:
            clear_batches(s, link)
    forget_bypasses(s)
    if s["n_tiers"] > 0:
        clear_lower(s)
