"""Links that read matrix by matrix: demands of a step that start together are a batch, which is one transfer.

The first matrix of all its experts lands first, then the second, and so on; with the last one they are resident. A
prefetch is a transfer of one expert, which lands as a whole. `flight` has a row for each expert, `lands` of the first
expert of a transfer is the time of its next event.
"""

from __future__ import annotations

from moereplay.simulator.compiled.cache import forget_evicted
from moereplay.simulator.compiled.clock import cpu_is_busy, move, resume
from moereplay.simulator.compiled.link import (
    begin,
    claim_on,
    demand_waits,
    drop,
    first_queued,
    issue,
    note_start,
    notify_arrival,
    place,
    prefetch_waits,
    set_landing,
    take_landed,
)
from moereplay.simulator.compiled.space import REFUSED
from moereplay.simulator.compiled.transfers import claim, land
from moereplay.simulator.jit.marks import called, fast
from moereplay.simulator.rates import NS


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
        size += s.copies[y]["bytes"]
    many = s["links"][link]["flight_end"] - first
    if many == 0:
        return False
    whole = batch_ns(s, link, size, many * s["matrices"])
    ends = move(s, link, s.flight[place(s, link, first)], whole)
    at = place(s, link, first)
    s.batch_count[at], s.bytes_at[at], s.wire_until[at] = many, ends - whole, ends
    s["links"][link]["crossings"] += 1
    set_landing(s, link, first, matrix_lands(s, at, 1))
    for i in range(first, first + many):
        note_start(s, link, s.flight[place(s, link, i)], ends)
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
    whole, part = s.matrix_sum[s["matrices"] - 1], s.matrix_sum[many - 1]
    return ns // whole * part + (ns % whole * part + whole - 1) // whole


@called
def land_by_matrix(s, hooks, link):
    """Process the landing of a prefetch, or of one matrix of a batch; the last one makes its experts resident."""
    mine = s["links"][link]
    at = place(s, link, mine["flight_first"])
    if s.owned[s.flight[at]]["prefetch"] == 0:
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
        if s["has_stages"] == 0 and (s.owned[y]["prefetch"] == 0 or s.owned[y]["awaited"] == 1):
            notify_arrival(s, y)
            resume(s)
    mine["crossings"] -= 1
    wake_for_all(s)


@fast
def wake_for_all(s):
    """Resume compute that waits for more than one arrival, so that it checks whether it may go on."""
    if s["has_stages"] == 1 or s["waits_for_all"] == 1:
        resume(s)


@called
def clear_batches(s, link):
    """Abandon the transfers of a link."""
    s["links"][link]["crossings"], s["links"][link]["matrices_here"] = 0, 0


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
