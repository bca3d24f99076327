"""All links. A transfer crosses one link after the other, from the highest tier that holds the copy to the fast tier.

Every expert has one home link into the fast tier. Links that act at the same time act in the order of their rows.
"""

from __future__ import annotations

from moereplay.policies.contract import IN_FLIGHT, NONE, QUEUED, RESIDENT
from moereplay.simulator.compiled.cache import find, land, set_state
from moereplay.simulator.compiled.clock import part, resume
from moereplay.simulator.compiled.counters import (
    IS_CANCEL,
    PREDICTABLE,
    PREDICTED,
    PREDICTED_DEMANDED,
    PREFETCH_CANCELLED,
    PREFETCH_ISSUED,
    count_at,
    count_here,
    page_of,
)
from moereplay.simulator.compiled.link import (
    CPU_WAITS,
    GOES_ON,
    GOES_TO_CPU,
    NO_CPU_WAITS,
    NOT_COMING,
    PREFETCH_WAITS,
    STAYS,
    abandon,
    any_announced,
    arrive,
    awaits_piece,
    batch_may_start,
    cancel_on,
    cell,
    copy_of,
    demand_waits,
    enqueue,
    entry_for_cpu,
    fill,
    first_fill,
    first_piece_arrived,
    highest,
    hold,
    land_by_matrix,
    landing,
    may_start,
    note_arrival,
    place,
    prefetch_waits,
    push,
    read,
    release,
    set_for_cpu,
    set_onward,
    start_by_matrix,
    start_on,
    take_landed,
    take_piece,
    tier_below,
)
from moereplay.simulator.compiled.ranking import predict
from moereplay.simulator.compiled.state import BAD_NAME, expert_of, fail, home_of, kind_of, layer_of
from moereplay.simulator.jit.marks import called, fast
from moereplay.simulator.rates import MILLION


@fast
def fetch(s, y):
    """Queue a demand behind other demands and ahead of all prefetches."""
    enqueue(s, y, 0)
    send_up(s, y, 0)


@fast
def announce(s, y):
    """Mark a demand as queued that `fetch_announced` will start later."""
    set_state(s, y, QUEUED)
    s["link"]["announced"] += 1


@fast
def fetch_announced(s, y):
    """Queue a demand that was announced."""
    s["link"]["announced"] -= 1
    fetch(s, y)


@fast
def prefetch(s, y, target, page):
    """Queue a prefetch behind older ones."""
    enqueue(s, y, 1)
    s.copies[y]["target"] = target
    count_at(s, page, PREFETCH_ISSUED, 1)
    if s["loads_prefetches"] == 1:
        s.to_load[s["preloads"]["end"]] = y
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
    return s.to_load[s["preloads"]["first"]]


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
    else:
        tier = highest(s, 0, y)
        if s["cpu_tier"] > 0 and tier >= s["cpu_tier"] - 1 and s.owned[y]["for_cpu"] != NO_CPU_WAITS:
            set_for_cpu(s, y, PREFETCH_WAITS)
        else:
            send_from(s, tier, y, y, is_prefetch)


@called
def send_from(s, tier, y, entry, is_prefetch):
    """Queue an entry of copy y on the link up from a tier, or let a transfer into the tier continue with it."""
    if tier < s["n_tiers"] and s.coming[cell(s, tier, y)] != NOT_COMING:
        set_onward(s, tier, y, GOES_ON if entry == y else GOES_TO_CPU)
    else:
        hold(s, tier, y)
        push(s, home_of(s, y) if tier == 0 else first_fill(s) + tier - 1, entry, is_prefetch)


# what the CPU reads


@called
def bring_for_cpu(s, y):
    """Hold copy y where the CPU reads it; return False if it is not there, and queue it to come."""
    tier = s["cpu_tier"] - 1
    if s.is_there[cell(s, tier, y)] == 1:
        hold(s, tier, y)
        read(s, tier, y)
        return True
    for below in range(tier, s["n_tiers"]):
        if s.coming[cell(s, below, y)] == GOES_ON and s.copies[y]["prefetch"] == 1:
            abandon(s, y, PREFETCH_CANCELLED, IS_CANCEL)
    set_for_cpu(s, y, CPU_WAITS)
    send_from(s, highest(s, tier, y), y, entry_for_cpu(s, y), 0)
    return False


@called
def land_for_cpu(s, tier, y):
    """Hold a copy that has come for the CPU, or send it on; return whether it is where the CPU reads."""
    if tier != s["cpu_tier"] - 1:
        send_from(s, tier, y, entry_for_cpu(s, y), 0)
        return False
    set_for_cpu(s, y, NO_CPU_WAITS)
    hold(s, tier, y)
    return True


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
        y, tier = copy_of(s, s.flight[place(s, link, at)]), link - first_fill(s)
        copy = s.copies[y]
        if s.coming[cell(s, tier, y)] == GOES_ON and copy["prefetch"] == 1 and copy["target"] <= step:
            set_onward(s, tier, y, STAYS)
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
    return next_to_land(s)[1]


@fast
def next_to_land(s):
    """Return the link whose transfer completes next, or whose first piece arrives, and when, ns."""
    first, at = 0, landing(s, 0)
    for link in range(1, s["n_links"]):
        its = landing(s, link)
        if its < at:
            first, at = link, its
    return first, at


@fast
def complete(s, hooks):
    """Process a LINK event: make the copy resident, and resume compute if it waits. The caller wakes the links."""
    link = next_to_land(s)[0]
    if s["by_matrix"] == 1:
        land_by_matrix(s, hooks, link)
        return
    if s["has_pieces"] == 1 and awaits_piece(s, link):
        arrive(s, take_piece(s, link))  # compute goes on as if the transfer were complete
        return
    piece_was_here = s["has_pieces"] == 1 and s["links"][link]["pieced"] == 1
    y = copy_of(s, take_landed(s, link))
    if s["n_tiers"] > 0:
        release(s, tier_below(s, link), y)
    if s["n_tiers"] > 0 and link >= first_fill(s):
        promote_to_next_tier(s, link - first_fill(s), y)
    else:
        land(s, hooks, y)
        if not piece_was_here:
            arrive(s, y)
    if s["waits_for_all"] == 1:  # compute also waits for the last arrival
        resume(s)


@called
def promote_to_next_tier(s, tier, y):
    """Continue the transfer of a copy from the lower tier that it has reached, or let the CPU have it."""
    onward = fill(s, tier, y)
    if onward == GOES_ON:
        send_up(s, y, s.copies[y]["prefetch"])
    elif s["cpu_tier"] > 0 and onward == GOES_TO_CPU:
        behind = s.owned[y]["for_cpu"] == PREFETCH_WAITS
        if land_for_cpu(s, tier, y):
            note_arrival(s, y, behind)


@fast
def any_link_is_busy(s):
    """Return whether a transfer is in flight, or a demand is queued or announced."""
    if any_announced(s):
        return True
    for link in range(s["n_links"]):
        if s["links"][link]["flight_first"] < s["links"][link]["flight_end"] or demand_waits(s, link):
            return True
    return False


@called
def any_in_flight(s):
    """Return whether a transfer is in flight."""
    for link in range(s["n_links"]):
        if s["links"][link]["flight_first"] < s["links"][link]["flight_end"]:
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
def nothing_else_until(s, end):
    """Return whether compute alone has events until `end` ns, and no transfer can start before one lands."""
    for link in range(s["n_links"]):
        if batch_may_start(s, link) if s["by_matrix"] == 1 else may_start(s, link):
            return False
    return s["external"] == 0 and next_landing(s) > end and s["clock"]["cpu_at"] > end


# Durations of dense parts and experts, ns, from the platform's tables.
#
# Compute is slower while a link works, if they share memory. Durations are 0 where the caller reports when work ends.


@fast
def dense_cost(s, index, layer):
    """Return the duration of the dense part of one layer in a pass."""
    row = s.dense_row[s.pass_tokens[index]]
    if s["external"] == 1:
        return 0
    drafted = s["draft_ns"] * s.pass_drafts[index] if s["draft_ns"] > 0 and layer == 0 else 0
    if s["slows_compute"] == 1 and any_link_is_busy(s):
        return drafted + s.slow_dense_ns[row, layer] + (s.slow_kv_ns[kv_row(s, index)] if s["reads_kv"] == 1 else 0)
    return drafted + s.dense_ns[row, layer] + (s.kv_ns[kv_row(s, index)] if s["reads_kv"] == 1 else 0)


@fast
def kv_row(s, index):
    """Return the index of a pass in tables of KV-cache reads: by pass, or where requests arrive by context."""
    return s["arrivals"]["context"] if s["arrives"] == 1 else index


@fast
def cost_of(s, turn):
    """Return the compute time of one access over its tokens, ns."""
    access = s.accesses[turn]
    return expert_cost(s, access["y"], access["tokens"])


@fast
def lasts(s, turn):
    """Return how long an access keeps compute busy, ns."""
    return lasting(s, s.accesses[turn]["y"], cost_of(s, turn))


@fast
def expert_cost(s, y, tokens):
    """Return the compute time of a copy in the current layer over `tokens` tokens."""
    if s["external"] == 1:
        return 0
    kind = s.now["layer"] if s["precisions"] == 1 and s["uneven"] == 0 else kind_of(s, y)
    if s["slows_compute"] == 1 and any_link_is_busy(s):
        return s.slow_expert_ns[s.cost_row[kind], tokens]
    return s.expert_ns[s.cost_row[kind], tokens]


@fast
def lasting(s, y, spent):
    """Return how long copy y keeps compute busy: longer than `spent` if only its first piece has arrived."""
    if s["has_pieces"] == 1 and first_piece_arrived(s, y):
        return until_the_rest(s, y, spent)
    return spent


@called
def until_the_rest(s, y, spent):
    """Return how long copy y keeps compute busy, given that its remainder must arrive before the rest runs."""
    link = home_of(s, y)
    lands = s.lands[place(s, link, s["links"][link]["flight_first"])]
    return max(spent, lands + part(spent, MILLION - s["links"][link]["first"], MILLION) - s["clock"]["time"])


# Predictions of the prefetch policy: what it suggests at a gate, and how much of it the target step demands.


@fast
def count_predicted(s):
    """Count the predictions of demanded experts since the layer's last gate, and how many were possible."""
    if s["has_suggest"] == 1:
        predicted, possible = 0, 0
        gates = min(s.now["layer"], s["reach"])  # that may have predicted an expert of this layer
        if s["next_pass"] == 1:
            gates = 1 if s["reset"]["passes"] > 0 else 0
        for n in range(s["demand"]["demanded"]):
            predictions = s.predictions[s.demand_expert[n]]
            predicted += predictions
            possible += max(gates, predictions)
        count_here(s, PREDICTED_DEMANDED, predicted)
        count_here(s, PREDICTABLE, possible)


@fast
def forget_predictions(s, first, end):
    for x in range(first, end):
        s.predictions[x] = 0


@fast
def suggest(s, hooks):
    """Call the prefetch policy, and queue the absent copies that it predicts."""
    layer = s.now["layer"]
    forget_predictions(s, layer * s["experts"], (layer + 1) * s["experts"])  # those for this gate have been counted
    if s["renews"] == 1:  # the policy repeats suggestions that it still needs
        cancel(s, s.now["step"] + s["layers"])
    total = hooks.suggest(s)
    if not 0 <= total <= s["n_copies"]:
        fail(s, BAD_NAME, total)
        return
    for i in range(total):
        y = s.suggested[i]
        if not 0 <= y < s["n_copies"]:
            fail(s, BAD_NAME, y)
            return
        record_prediction(s, hooks, y)


@fast
def record_prediction(s, hooks, y):
    """Record the prediction of copy y, and prefetch it if it is absent."""
    x, layer = expert_of(s, y), layer_of(s, y)
    precision, page = y - x * s["precisions"], page_of(s, layer)
    count_at(s, page, PREDICTED, 1)
    s.predictions[x] += 1
    resident = find(s, x, precision, RESIDENT)
    if resident != NONE:
        predict(s, hooks, resident)
    elif find(s, x, precision, IN_FLIGHT) == NONE and find(s, x, precision, QUEUED) == NONE:
        prefetch(s, y, s.now["step"] + (s["layers"] if s["next_pass"] == 1 else layer - s.now["layer"]), page)
