"""A link: a queue with demands ahead of prefetches, and transfers that run first in, first out, without preemption.

`link` is a row of `links`: first the links into the fast tier, then one into each lower tier.
"""

from __future__ import annotations

from moereplay.policies.contract import ABSENT, NONE, QUEUED
from moereplay.simulator.compiled.cache import BYPASSED, GRANTED, REFUSED, claim, forget_evicted, land, set_state
from moereplay.simulator.compiled.clock import NEVER_DUE, cpu_is_busy, first_piece, free, move, part, resume, send
from moereplay.simulator.compiled.counters import (
    BY_CPU,
    BY_DEMAND,
    BY_PREFETCH,
    BY_STREAM,
    BYTES_DEMAND,
    BYTES_LOWER,
    BYTES_PREFETCH,
    IS_CANCEL,
    IS_DROP,
    IS_FILL,
    IS_TRANSFER,
    PREFETCH_CANCELLED,
    PREFETCH_DROPPED,
    PREFETCH_STARTED,
    PREFETCH_USED,
    count,
    count_at,
    note,
    page_of,
    span,
)
from moereplay.simulator.compiled.state import home_of, layer_of, size_of
from moereplay.simulator.jit.marks import called, fast
from moereplay.simulator.rates import MILLION, NS

# The tiers below the fast tier: their copies and evictions, in bytes without time.
#
# A copy is held from the queueing of its transfer until it has crossed the link, and while the CPU reads it; held
# copies are not evicted. The least recently read copy is evicted first, or the first that came if the tier says so.
# `tier` is a row of `lower`; the slow tier has no row and holds every copy.

#: A copy is not on its way into a tier, or it is and stays there, goes on up, or goes on to where the CPU reads.
NOT_COMING, STAYS, GOES_ON, GOES_TO_CPU = range(4)
#: `owned.for_cpu`: nothing comes for the CPU, a copy comes, or a prefetch goes on from where it will lie.
NO_CPU_WAITS, CPU_WAITS, PREFETCH_WAITS = range(3)


@fast
def cell(s, tier, y):
    """Return the index of a copy in the tiers' arrays."""
    return tier * s["n_copies"] + y


@fast
def show(s, tier, y, here):
    """Set whether a tier has a complete copy; policies see what the highest has."""
    s.is_there[cell(s, tier, y)] = here
    if tier == 0:
        s.owned[y]["lower"] = here


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
            s["lower"][tier]["held_bytes"] += size_of(s, y)


@called
def release(s, tier, y):
    """Release copy y: it has crossed the link, or will not, or the CPU has read it."""
    if tier < s["n_tiers"]:
        s.held[cell(s, tier, y)] -= 1
        if s.held[cell(s, tier, y)] == 0:
            s["lower"][tier]["held_bytes"] -= size_of(s, y)


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
    mine, size = s["lower"][tier], size_of(s, y)
    evictable = mine["complete"] - mine["held_bytes"]  # held copies stay until they have crossed the link
    if mine["used"] + size - evictable > mine["capacity"]:
        return False
    victim = mine["oldest"]
    while mine["used"] + size > mine["capacity"]:
        following = s.newer[cell(s, tier, victim)]
        if s.held[cell(s, tier, victim)] == 0:
            take_out(s, tier, victim)
            show(s, tier, victim, 0)
            mine["used"] -= size_of(s, victim)
            mine["complete"] -= size_of(s, victim)
        victim = following
    mine["used"] += size
    s.coming[cell(s, tier, y)] = onward
    return True


@called
def fill(s, tier, y):
    """Complete a transfer into the tier; return what goes on from there."""
    show(s, tier, y, 1)
    s["lower"][tier]["complete"] += size_of(s, y)
    put_last(s, tier, y)
    onward = s.coming[cell(s, tier, y)]
    s.coming[cell(s, tier, y)] = NOT_COMING
    return onward


@called
def warm_lower(s, tier, y):
    """Make copy y resident in a tier before the start."""
    s["lower"][tier]["used"] += size_of(s, y)
    fill(s, tier, y)


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
    return not is_for_cpu(s, entry) and s.copies[entry]["prefetch"] == 1


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
            show(s, tier, y, 0)
            s.held[cell(s, tier, y)] = 0
            s.coming[cell(s, tier, y)] = NOT_COMING
    for y in range(s["n_copies"]):
        s.owned[y]["for_cpu"] = NO_CPU_WAITS


@fast
def mask(s, at):
    """Return the ring index of a position."""
    return at & s["ring_mask"]


@fast
def place(s, link, at):
    """Return the index of a position in a link's part of the rings."""
    if s["n_links"] == 1:
        return mask(s, at)
    return link * s["n_ring"] + mask(s, at)


# the queue


@fast
def enqueue(s, y, as_prefetch):
    """Mark copy y as queued, with a new transfer."""
    set_state(s, y, QUEUED)
    s.copies[y]["prefetch"], s.copies[y]["awaited"] = as_prefetch, 0
    if s["has_admit"] == 1:
        s.owned[y]["bypasses"] = 0


@fast
def any_announced(s):
    """Return whether compute has yet to hand over a demand."""
    return s["has_loading"] == 1 and s["link"]["announced"] > 0


@fast
def push(s, link, entry, as_prefetch):
    """Append an entry to a link's demand queue or prefetch queue."""
    mine = s["links"][link]
    if as_prefetch == 1:
        s.prefetch_queue[place(s, link, mine["prefetch_end"])] = entry
        mine["prefetch_end"] += 1
    else:
        s.demand_queue[place(s, link, mine["demand_end"])] = entry
        mine["demand_end"] += 1


@fast
def cancel_on(s, link, step):
    """Cancel queued prefetches for this step or an earlier one; the others keep their order."""
    kept = s["links"][link]["prefetch_first"]
    for at in range(s["links"][link]["prefetch_first"], s["links"][link]["prefetch_end"]):
        y = s.prefetch_queue[place(s, link, at)]
        if s.copies[y]["target"] <= step:
            if s["n_tiers"] > 0:
                release(s, tier_below(s, link), y)
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)
        else:
            s.prefetch_queue[place(s, link, kept)] = y
            kept += 1
    s["links"][link]["prefetch_end"] = kept


@fast
def abandon(s, y, counter, line):
    """Remove a queued prefetch and count it under `counter`."""
    set_state(s, y, ABSENT)
    count(s, counter, layer_of(s, y), 1)
    note(s, line, y, BY_PREFETCH)


# transfers


@fast
def start_on(s, hooks, link):
    """Start transfers on a link, demands first. A demand that finds no space blocks the link."""
    while may_start(s, link):
        entry = first_queued(s, link)
        claimed = claim_on(s, hooks, link, entry)
        if claimed != REFUSED:
            begin(s, link, entry, claimed)
        elif not is_prefetch(s, entry):
            return
        else:
            drop(s, link, entry)


@fast
def claim_on(s, hooks, link, entry):
    """Reserve space for the first queued entry in the tier that the link fills."""
    if s["victim_ns"] > 0:
        forget_evicted(s)
    if s["n_tiers"] > 0 and link >= first_fill(s):
        onward = GOES_TO_CPU if is_for_cpu(s, entry) else GOES_ON
        return GRANTED if claim_lower(s, link - first_fill(s), copy_of(s, entry), onward) else REFUSED
    return claim(s, hooks, entry)


@fast
def may_start(s, link):
    """Return whether a transfer is queued and the link has a free slot."""
    return (demand_waits(s, link) or prefetch_waits(s, link)) and has_room(s, link)


@fast
def has_room(s, link):
    """Return whether a link has a free slot."""
    mine = s["links"][link]
    return mine["flight_end"] - mine["flight_first"] < mine["depth"]


@fast
def first_queued(s, link):
    """Return the entry whose transfer starts next."""
    if demand_waits(s, link):
        return s.demand_queue[place(s, link, s["links"][link]["demand_first"])]
    return s.prefetch_queue[place(s, link, s["links"][link]["prefetch_first"])]


@fast
def drop(s, link, y):
    """Drop the first queued prefetch, because it finds no space."""
    s["links"][link]["prefetch_first"] += 1
    if s["n_tiers"] > 0:
        release(s, tier_below(s, link), y)
    abandon(s, y, PREFETCH_DROPPED, IS_DROP)


@fast
def begin(s, link, entry, claimed):
    """Issue the first queued transfer."""
    page = page_of(s, layer_of(s, copy_of(s, entry)))
    ends = send(s, link, copy_of(s, entry), page)
    issue(s, link, entry, claimed, ends)
    note_start(s, link, entry, ends, page)


@fast
def issue(s, link, entry, claimed, ends):
    """Move the first queued entry to those in flight."""
    mine, y = s["links"][link], copy_of(s, entry)
    if s["has_admit"] == 1 and not is_for_cpu(s, entry):
        s.owned[y]["bypasses"] = 1 if claimed == BYPASSED else 0
    at = place(s, link, mine["flight_end"])
    never = s["link"]["closed"] == 1 or s["external"] == 1
    s.flight[at], s.lands[at] = entry, NEVER_DUE if never else ends
    if s["has_pieces"] == 1:
        s.piece_at[at] = NEVER_DUE if s["link"]["closed"] == 1 else first_piece(s, link, y)
    mine["flight_end"] += 1
    if is_prefetch(s, entry):
        mine["prefetch_first"] += 1
    else:
        mine["demand_first"] += 1
    if s["n_tiers"] > 0:
        read(s, tier_below(s, link), y)


@fast
def start_again(s, y):
    """Start a transfer that another platform's run has started, without a queue."""
    mine, ends = s["links"][0], send(s, 0, y, page_of(s, layer_of(s, y)))
    s.lands[place(s, 0, mine["flight_end"])] = NEVER_DUE if s["link"]["closed"] == 1 else ends
    mine["flight_end"] += 1


@fast
def set_landing(s, link, at, time):
    """Set the time of the next event of a transfer in flight, ns; `at`: its position in the ring."""
    s.lands[place(s, link, at)] = time


@fast
def note_start(s, link, entry, ends, page):
    """Count and log a transfer that starts."""
    y, kind = copy_of(s, entry), IS_TRANSFER
    size = size_of(s, y)
    if s["n_tiers"] > 0 and link >= first_fill(s):
        count_at(s, page, BYTES_LOWER, size)
        kind = IS_FILL
    elif is_prefetch(s, entry):
        count_at(s, page, PREFETCH_STARTED, 1)
        count_at(s, page, BYTES_PREFETCH, size)
    else:
        count_at(s, page, BYTES_DEMAND, size)
    span(s, kind, y, 0, ends - s["clock"]["time"], cause(s, entry))


@fast
def cause(s, entry):
    """Return the cause of a transfer for the event log."""
    if is_for_cpu(s, entry):
        return BY_CPU
    if s.copies[entry]["prefetch"] == 1:
        return BY_PREFETCH
    return BY_STREAM if s.owned[entry]["bypasses"] == 1 else BY_DEMAND


@fast
def landing(s, link):
    """Return when a link's next transfer completes, or its first piece arrives, ns."""
    if s["links"][link]["flight_first"] == s["links"][link]["flight_end"]:
        return NEVER_DUE
    at = place(s, link, s["links"][link]["flight_first"])
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        return s.piece_at[at]
    return s.lands[at]


@fast
def awaits_piece(s, link):
    """Return whether the next event of a link is the arrival of a first piece."""
    return s["links"][link]["first"] < MILLION and s["links"][link]["pieced"] == 0


@fast
def take_piece(s, link):
    """Record the arrival of the first piece of a link's oldest transfer; return its copy."""
    s["links"][link]["pieced"] = 1
    return s.flight[place(s, link, s["links"][link]["flight_first"])]


@fast
def first_piece_arrived(s, y):
    """Return whether copy y is in flight, next to complete on its link, and its first piece has arrived."""
    mine = s["links"][home_of(s, y)]
    return mine["pieced"] == 1 and s.flight[place(s, home_of(s, y), mine["flight_first"])] == y


@fast
def take_landed(s, link):
    """Remove a link's oldest transfer, which is complete; return its entry."""
    y = s.flight[place(s, link, s["links"][link]["flight_first"])]
    s["links"][link]["flight_first"] += 1
    if s["has_pieces"] == 1:
        s["links"][link]["pieced"] = 0
    return y


@fast
def notify_arrival(s, y):
    """Add copy y to the arrivals that compute waits for."""
    s.ready[mask(s, s["link"]["ready_end"])] = y
    s["link"]["ready_end"] += 1


@fast
def arrive(s, y):
    """Give copy y to compute and resume it, if it waits, or will wait, for this transfer."""
    if s.copies[y]["prefetch"] == 0 or s.copies[y]["awaited"] == 1:
        notify_arrival(s, y)
        resume(s)


@fast
def first_fill(s):
    """Return the first link that fills a lower tier."""
    return s["n_links"] - s["n_tiers"]


@fast
def tier_below(s, link):
    """Return the tier that a link reads: a row of `lower`, or the number of rows for the slow tier."""
    return max(0, link - first_fill(s) + 1)


# queries


@fast
def demand_waits(s, link):
    return s["links"][link]["demand_first"] < s["links"][link]["demand_end"]


@fast
def prefetch_waits(s, link):
    return s["links"][link]["prefetch_first"] < s["links"][link]["prefetch_end"]


@fast
def await_transfer(s, y):
    """Make a demand wait for the transfer of copy y."""
    copy = s.copies[y]
    if copy["prefetch"] == 1 and copy["awaited"] == 0:
        copy["awaited"] = 1
        count(s, PREFETCH_USED, layer_of(s, y), 1)
        if s["has_pieces"] == 1 and first_piece_arrived(s, y):
            notify_arrival(s, y)


# start and end


@called
def clear_links(s):
    """Empty all queues, abandon all transfers and empty the lower tiers."""
    for link in range(s["n_links"]):
        mine = s["links"][link]
        mine["demand_first"], mine["prefetch_first"] = mine["demand_end"], mine["prefetch_end"]
        mine["flight_first"], mine["pieced"] = mine["flight_end"], 0
        mine["crossings"], mine["matrices_here"] = 0, 0
        free(s, link)
    for y in range(s["n_copies"]):
        s.owned[y]["bypasses"] = 0
    if s["n_tiers"] > 0:
        clear_lower(s)


@fast
def close_links(s):
    """End the run: transfers that are issued from here on never land."""
    s["link"]["closed"] = 1


# Links that read matrix by matrix: demands of a step that start together are a batch, which is one transfer.
#
# The first matrix of all its experts lands first, then the second, and so on; with the last one they are resident. A
# prefetch is a transfer of one expert, which lands as a whole. `flight` has a row for each expert, `lands` of the
# first expert of a transfer is the time of its next event.


@called
def start_by_matrix(s, hooks, link):
    """Start transfers on a link: a batch of demands, then prefetches. A demand without space blocks the link."""
    while batch_may_start(s, link):
        if demand_waits(s, link):
            if not start_batch(s, hooks, link):
                return
        else:
            start_prefetch(s, hooks, link)


@fast
def batch_may_start(s, link):
    """Return whether a transfer is queued and the link has a free slot."""
    mine = s["links"][link]
    return mine["crossings"] < mine["depth"] and (demand_waits(s, link) or prefetch_waits(s, link))


@called
def start_prefetch(s, hooks, link):
    """Start the first queued prefetch, or drop it if it finds no space."""
    y = first_queued(s, link)
    claimed = claim_on(s, hooks, link, y)
    if claimed == REFUSED:
        drop(s, link, y)
        return
    s.batch_count[place(s, link, s["links"][link]["flight_end"])] = 1
    begin(s, link, y, claimed)
    s["links"][link]["crossings"] += 1


@called
def start_batch(s, hooks, link):
    """Start one transfer of as many demands as find space, in demand order; return whether there are any."""
    first, size = s["links"][link]["flight_end"], 0
    if s["victim_ns"] > 0:
        forget_evicted(s)
    while demand_waits(s, link):
        y = first_queued(s, link)
        claimed = claim(s, hooks, y)
        if claimed == REFUSED:
            break
        s.owned[y]["parts"] = 0
        issue(s, link, y, claimed, 0)
        size += size_of(s, y)
    many = s["links"][link]["flight_end"] - first
    if many == 0:
        return False
    whole = batch_ns(s, link, size, many * s["matrices"])
    y = s.flight[place(s, link, first)]
    ends = move(s, link, y, whole, page_of(s, layer_of(s, y)))
    at = place(s, link, first)
    s.batch_count[at], s.bytes_at[at], s.wire_until[at] = many, ends - whole, ends
    s["links"][link]["crossings"] += 1
    set_landing(s, link, first, matrix_lands(s, at, 1))
    for i in range(first, first + many):
        y = s.flight[place(s, link, i)]
        note_start(s, link, y, ends, page_of(s, layer_of(s, y)))
    return True


@fast
def matrix_lands(s, at, many):
    """Return when the first `many` matrices of a batch have landed, ns; `at`: its index in the rings."""
    return s.bytes_at[at] + of_matrices(s, s.wire_until[at] - s.bytes_at[at], many)


@called
def of_matrices(s, ns, many):
    """Return the part of a time that the first `many` matrices take, rounded up."""
    if many == 0:
        return 0
    return part(ns, s.matrix_sum[many - 1], s.matrix_sum[s["matrices"] - 1])


@called
def land_by_matrix(s, hooks, link):
    """Process the landing of a prefetch, or of one matrix of a batch; the last one makes its experts resident."""
    mine = s["links"][link]
    at = place(s, link, mine["flight_first"])
    if s.copies[s.flight[at]]["prefetch"] == 0:
        mine["matrices_here"] += 1
        for i in range(s.batch_count[at]):
            s.owned[s.flight[place(s, link, mine["flight_first"] + i)]]["parts"] = mine["matrices_here"]
        if mine["matrices_here"] < s["matrices"]:
            set_landing(s, link, mine["flight_first"], matrix_lands(s, at, mine["matrices_here"] + 1))
            wake_for_all(s)
            return
        mine["matrices_here"] = 0
    for _ in range(s.batch_count[at]):
        y = take_landed(s, link)
        land(s, hooks, y)
        if s["has_stages"] == 0:
            arrive(s, y)
    mine["crossings"] -= 1
    wake_for_all(s)


@fast
def wake_for_all(s):
    """Resume compute that waits for more than one arrival, so that it checks whether it may go on."""
    if s["has_stages"] == 1 or s["waits_for_all"] == 1:
        resume(s)


# time on the wire: whole bytes per second, 0 being infinite


@called
def batch_ns(s, link, size, reads):
    """Return how long `size` bytes in so many reads occupy the wire if they start now, ns."""
    slow = cpu_is_busy(s)
    rate = rate_of_reads(s, link, size // reads, slow)
    at = link * s["n_lanes"] + min(reads, s["n_lanes"]) - 1
    lanes = s.slow_lane_rate[at] if slow else s.lane_rate[at]
    if rate == 0 or 0 < lanes < rate:
        rate = lanes
    return 0 if rate == 0 else duration(size, rate)


@called
def rate_of_reads(s, link, size, slow):
    """Return the rate of reads of so many bytes: linear between points, rounded down, constant beyond both ends."""
    first, last = s.read_first[link], s.read_first[link + 1] - 1
    at = first
    while at < last and s.read_size[at] < size:
        at += 1
    high = s.slow_read_rate[at] if slow else s.read_rate[at]
    if at == first or s.read_size[at] <= size:
        return high
    low = s.slow_read_rate[at - 1] if slow else s.read_rate[at - 1]
    width = s.read_size[at] - s.read_size[at - 1]
    if high >= low:
        return low + portion(high - low, size - s.read_size[at - 1], width)
    return high + portion(low - high, s.read_size[at] - size, width)


@called
def portion(amount, part, whole):
    """Return amount * part / whole, rounded down, for 0 <= part <= whole and amounts below 2^60.

    By long division in base 2, since the product may have more than 64 bits.
    """
    quotient, rest = 0, 0
    for bit in range(59, -1, -1):
        quotient *= 2
        if rest >= whole - rest:
            rest, quotient = rest - (whole - rest), quotient + 1
        else:
            rest += rest
        if (amount >> bit) & 1 == 1:
            if rest >= whole - part:
                rest, quotient = rest - (whole - part), quotient + 1
            else:
                rest += part
    return quotient


@called
def duration(size, rate):
    """Return the nanoseconds of `size` bytes at a rate, rounded up."""
    return size // rate * NS + NS - portion(NS, rate - size % rate, rate)
