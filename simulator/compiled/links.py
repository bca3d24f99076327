"""All links: a transfer crosses one after the other, up from the highest tier that has its copy to the fast tier.

The link into the fast tier is that of the expert's home. Where several links act at the same time the lower row is
first.
"""

from __future__ import annotations

from moereplay.simulator.compiled.clock import resume
from moereplay.simulator.compiled.counters import (
    PREFETCH_CANCELLED,
    PREFETCH_ISSUED,
    count,
)
from moereplay.simulator.compiled.link import (
    abandon,
    aim,
    any_announced,
    awaits_piece,
    call_up,
    cancel_on,
    clear_link,
    demand_waits,
    enqueue,
    first_fill,
    forget_bypasses,
    is_busy,
    is_moving,
    landing,
    place,
    prefetch_waits,
    push,
    start_on,
    take_announced,
    take_landed,
    take_piece,
    tier_below,
)
from moereplay.simulator.compiled.log import (
    IS_CANCEL,
)
from moereplay.simulator.compiled.lower_tiers import (
    clear_lower,
    fill,
    goes_no_further,
    goes_on,
    highest,
    hold,
    release,
)
from moereplay.simulator.compiled.state import (
    flight,
    home_of,
    layer_of,
    owned,
)
from moereplay.simulator.compiled.transfers import land
from moereplay.simulator.jit.marks import called, fast


@fast
def fetch(s, y):
    """Queue a demand, behind other demands and ahead of all prefetches."""
    enqueue(s, y, 0)
    send_up(s, y, 0)


@fast
def fetch_announced(s, y):
    """Queue a demand that was announced."""
    take_announced(s)
    fetch(s, y)


@fast
def prefetch(s, y, target):
    """Queue a prefetch, behind older ones."""
    enqueue(s, y, 1)
    aim(s, y, target)
    send_up(s, y, 1)
    count(s, PREFETCH_ISSUED, layer_of(s, y), 1)


@fast
def send_up(s, y, is_prefetch):
    """Queue a copy on the link that it crosses next, or let what is under way into a lower tier go on."""
    if s["n_tiers"] == 0:
        push(s, home_of(s, y), y, is_prefetch)
    elif owned(s)[y]["coming"] == 1:
        goes_on(s, y)
    else:
        tier = highest(s, y)
        hold(s, tier, y)
        push(s, home_of(s, y) if tier == 0 else first_fill(s) + tier - 1, y, is_prefetch)


@fast
def cancel(s, step):
    """Drop every prefetch aimed at this step or an earlier one that has not started into the fast tier."""
    for link in range(s["n_links"]):
        cancel_on(s, link, step)
    if s["n_tiers"] > 0:
        for link in range(first_fill(s), s["n_links"]):
            stop_fills(s, link, step)


@called
def stop_fills(s, link, step):
    """Prefetches aimed at this step or an earlier one that are under way into a lower tier stay there."""
    for at in range(s["links"][link]["flight_first"], s["links"][link]["flight_end"]):
        y = flight(s)[place(s, link, at)]
        mine = owned(s)[y]
        if mine["onward"] == 1 and mine["prefetch"] == 1 and mine["target"] <= step:
            goes_no_further(s, y)
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)


@fast
def start_transfers(s, hooks):
    """Start whatever can start now."""
    for link in range(s["n_links"]):
        start_on(s, hooks, link)


@fast
def next_landing(s):
    """When the next transfer is complete, or a first piece of it."""
    return landing(s, next_to_land(s))


@fast
def next_to_land(s):
    """The link whose transfer is complete next."""
    if s["n_links"] == 1:
        return 0
    next_one = 0
    for link in range(1, s["n_links"]):
        if landing(s, link) < landing(s, next_one):
            next_one = link
    return next_one


@fast
def complete(s, hooks):
    """One LINK event: resident, and compute is woken if it waits for this copy. The caller wakes the links."""
    link = next_to_land(s)
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        show_piece(s, link)
        return
    piece_was_here = s["has_pieces"] == 1 and s["links"][link]["pieced"] == 1
    y = take_landed(s, link)
    if s["n_tiers"] > 0:
        release(s, tier_below(s, link), y)
    if s["n_tiers"] > 0 and link >= first_fill(s):
        rise(s, y, fill(s, link - first_fill(s), y))
    else:
        land(s, hooks, y)
        if not piece_was_here and is_awaited(s, y):
            call_up(s, y)
            resume(s)
    if s["waits_for_all"] == 1:  # nothing more may come
        resume(s)


@fast
def is_awaited(s, y):
    """Whether compute waits for a transfer, or will."""
    return owned(s)[y]["prefetch"] == 0 or owned(s)[y]["awaited"] == 1


@called
def show_piece(s, link):
    """One LINK event: compute is woken if it waits for this copy, as if it were complete."""
    y = take_piece(s, link)
    if is_awaited(s, y):
        call_up(s, y)
        resume(s)


@called
def rise(s, y, onward):
    """A copy that has come into a lower tier goes on from there, if its transfer does."""
    if onward:
        send_up(s, y, owned(s)[y]["prefetch"])


@fast
def any_link_is_busy(s):
    """Whether something is on its way, or a demand is about to be."""
    if any_announced(s):
        return True
    for link in range(s["n_links"]):
        if is_busy(s, link):
            return True
    return False


@called
def any_in_flight(s):
    """Whether something is on its way."""
    for link in range(s["n_links"]):
        if is_moving(s, link):
            return True
    return False


@fast
def prefetches_wait(s):
    """Whether a prefetch waits to start, or may be under way into a lower tier."""
    if s["n_tiers"] > 0:
        return True
    for link in range(s["n_links"]):
        if prefetch_waits(s, link):
            return True
    return False


@fast
def nothing_queued(s):
    """Whether no transfer waits to start."""
    for link in range(s["n_links"]):
        if demand_waits(s, link) or prefetch_waits(s, link):
            return False
    return True


@called
def clear_links(s):
    """Nothing is queued, what is in flight is abandoned, and the lower tiers are empty."""
    for link in range(s["n_links"]):
        clear_link(s, link)
    forget_bypasses(s)
    if s["n_tiers"] > 0:
        clear_lower(s)
