"""Victim selection by key: the smallest (key, logical timestamp, copy) of a pool's candidates.

The keys of candidates lie in one row per layer, next to their orders (timestamp and copy in one number), and every
row keeps its smallest; scanning a short row takes half the time of a tournament tree. Changes to a copy only
invalidate its key. Keys are evaluated in batches when a victim is needed, and only rows that lost their smallest key
are scanned again. A row is a pool, or part of the only pool; if each link has a pool, its rows are those of its layers.

A policy declares the key-validity scope, in which the key of a copy without changes stays valid. `touch`: always.
`pass`, `step`: until the next one. `layer`: within a pass, the keys of a layer move by the same amount, so that one of
them is evaluated. Rows hold keys less `row_shift`, by which their layer has moved.

Where the key is the logical timestamp itself, queues replace keys. Each pool has a ring of its copies through a node of
its own, which closes it; a copy in no queue is a ring of itself. By last use, a copy is queued at the gate that sets
its timestamp, before it has arrived; it is pinned until then.
"""

from __future__ import annotations

import numpy as np

from moereplay.policies.contract import KEY_SCOPES, QUEUES
from moereplay.simulator.compiled.state import (
    BY_LINK,
    NEVER_LEFT,
    NO_KEY,
    ONE_POOL,
    expert_of,
    first_copy,
    layer_of,
    notifier,
    pool_of,
)
from moereplay.simulator.jit.marks import called, fast

TOUCH, LAYER, STEP, PASS = range(len(KEY_SCOPES))


# invalid keys


@fast
def invalidate_expert(s, x):
    """Invalidate the keys of all copies of expert x."""
    if s["precisions"] == 1:
        invalidate(s, x)
    else:
        invalidate_copies(s, x)


@called
def invalidate_copies(s, x):
    first = x * s["precisions"]
    for y in range(first, first + s["precisions"]):
        invalidate(s, y)


@fast
def invalidate(s, y):
    """Invalidate the key of copy y: it is evaluated before the next victim is selected."""
    copy = s.copies[y]
    if s["ranks"] == 1 and copy["member"] == 1 and copy["invalid"] == 0:
        copy["invalid"] = 1
        s.invalid_copies[s["ranking"]["invalid_now"]] = y
        s["ranking"]["invalid_now"] += 1


# members of a pool


@fast
def row_of(s, y):
    """Return the row of candidates of copy y: that of its layer, or of its link and layer."""
    if s["pooled"] != BY_LINK:
        return layer_of(s, y)
    return pool_of(s, y) * s["layers"] + layer_of(s, y)


@called
def add_member(s, y):
    """Add copy y to its row's members, and rank it if it is a candidate."""
    if s["key_scope"] != TOUCH:
        row = row_of(s, y)
        s.owned[y]["member_at"] = s.member_count[row]
        s.members[row * s["row_length"] + s.member_count[row]] = y
        s.member_count[row] += 1
    if s.copies[y]["protected"] == 0:  # else `unpin` invalidates it
        invalidate(s, y)


@called
def remove_member(s, y):
    """Remove copy y from the members and candidates of its row."""
    if s["key_scope"] != TOUCH:
        row, at = row_of(s, y), s.owned[y]["member_at"]
        base = row * s["row_length"]
        s.member_count[row] -= 1
        last = s.members[base + s.member_count[row]]
        s.members[base + at] = last  # the order of members is free, so the last one fills the gap
        s.owned[last]["member_at"] = at
    leave_row(s, y)


# selection


@called
def smallest(s, keys, pool):
    """Return the first victim of a pool that has candidates."""
    if s["key_scope"] != TOUCH:
        refresh_keys(s, keys, pool, s.now["pass"] if s["key_scope"] == PASS else s.now["step"] * 2 + s.now["gated"])
    if s["ranking"]["invalid_now"] > 0:
        rank_invalid(s, keys)
    if s["ranking"]["rows_marked"] > 0:
        compare_rows(s)
    first = pool * s["pool_rows"]
    return copy_of_order(s, smallest_entry(s.least_key, s.least_order, first, first + s["pool_rows"])[1])


@called
def rank_invalid(s, keys):
    """Evaluate invalid keys, and remove copies that are no longer candidates."""
    count = 0
    for i in range(s["ranking"]["invalid_now"]):
        y = s.invalid_copies[i]
        if s.copies[y]["invalid"] == 1:  # else `refresh_layer` has ranked it
            s.copies[y]["invalid"] = 0
            count += key_or_leave_row(s, y, count)
    s["ranking"]["invalid_now"] = 0
    rank(s, keys, count)


@fast
def key_or_leave_row(s, y, count):
    """Return 1 and add copy y to the batch at `count` if it is a candidate; else remove it from its row."""
    if is_candidate(s, y):
        request_key(s, count, y)
        return 1
    leave_row(s, y)
    return 0


@fast
def request_key(s, at, y):
    """Add copy y to the next batch of keys, at position `at`."""
    s.eval_copies[at] = y


@called
def rank(s, keys, count):
    """Evaluate a batch of keys and store them with their orders."""
    if count == 0:
        return
    keys(s, count)
    for i in range(count):
        y, key = s.eval_copies[i], s.eval_keys[i]
        at, order = row_place(s, y), last_use(s, y) * s["n_ring"] + y
        s.row_key[at], s.row_order[at] = key - s.row_shift[row_of(s, y)], order
        update_minimum(s, row_of(s, y), y, key, order)


@fast
def is_candidate(s, y):
    """Return whether copy y is a candidate."""
    return s.copies[y]["member"] == 1 and s.copies[y]["protected"] == 0


@fast
def last_use(s, y):
    """Return the logical timestamp of the last use of a copy's expert."""
    return s.copies[first_copy(s, expert_of(s, y))]["last_use"]


@fast
def copy_of_order(s, order):
    """Return the copy in the low bits of an order; `n_ring` is a power of two above all copies."""
    return order & s["ring_mask"]


@fast
def row_place(s, y):
    """Return the position of copy y in its row, appending it if it has none."""
    mine, row = s.owned[y], row_of(s, y)
    if mine["row_at"] == 0:
        s.row_count[row] += 1
        mine["row_at"] = s.row_count[row]
    return row * s["row_length"] + mine["row_at"] - 1


@fast
def update_minimum(s, row, y, key, order):
    """Update its row's smallest key with copy y's; mark the row if copy y held the smallest."""
    best_key, best = s.least_key[row], s.least_order[row]
    # a new key of the smallest copy may no longer be the smallest
    if copy_of_order(s, best) == y:  # NO_KEY is the order of no copy
        mark_row(s, row)
    elif key < best_key or (key == best_key and order < best):
        s.least_key[row], s.least_order[row] = key, order


@fast
def leave_row(s, y):
    """Remove copy y from its row; the last entry takes its place."""
    mine, row = s.owned[y], row_of(s, y)
    if mine["row_at"] == 0:
        return
    s.row_count[row] -= 1
    at, last = row * s["row_length"] + mine["row_at"] - 1, row * s["row_length"] + s.row_count[row]
    s.row_key[at], s.row_order[at] = s.row_key[last], s.row_order[last]
    s.owned[copy_of_order(s, s.row_order[last])]["row_at"] = mine["row_at"]
    mine["row_at"] = 0
    if copy_of_order(s, s.least_order[row]) == y:
        mark_row(s, row)


# key-validity scopes


@fast
def refresh_keys(s, keys, pool, scope):
    """Refresh keys of an older scope: the pool's, and with several pools those of rows about to be ranked.

    `scope`: a number that changes when keys of copies without changes may.
    """
    if s.pools[pool]["scope"] != scope:
        refresh_rows(s, keys, pool * s["pool_rows"], (pool + 1) * s["pool_rows"], scope)
        s.pools[pool]["scope"] = scope
    for i in range(s["ranking"]["invalid_now"] if s["pooled"] != ONE_POOL else 0):
        y = s.invalid_copies[i]
        if s.copies[y]["invalid"] == 1 and is_candidate(s, y):
            refresh_rows(s, keys, row_of(s, y), row_of(s, y) + 1, scope)


@called
def refresh_rows(s, keys, first, last, scope):
    """Refresh rows [first, last): evaluate all keys, or one per row to learn the common shift."""
    count = 0
    for row in range(first, last):
        stays = s["key_scope"] == LAYER and s.keyed_pass[row] == s.now["pass"]
        if s.keyed_scope[row] != scope and not stays:
            refresh_row(s, keys, row, scope)
    for row in range(first, last):
        if s.keyed_scope[row] != scope:
            count += key_untouched(s, row, count)
            s.keyed_scope[row] = scope
    shift(s, keys, count)


@called
def refresh_row(s, keys, row, scope):
    """Evaluate the keys of all candidates of a row."""
    base, count = row * s["row_length"], 0
    s.row_shift[row] = 0
    for i in range(base, base + s.member_count[row]):
        y = np.int64(s.members[i])
        s.copies[y]["invalid"] = 0  # it stays in the list; `rank_invalid` skips it
        count += key_or_leave_row(s, y, count)
    rank(s, keys, count)
    s.keyed_scope[row], s.keyed_pass[row] = scope, s.now["pass"]


@fast
def key_untouched(s, row, count):
    """Return 1 and add a valid copy of the row to the batch at `count`; 0 if there is none."""
    for at in range(row * s["row_length"], row * s["row_length"] + s.row_count[row]):
        y = copy_of_order(s, s.row_order[at])
        if s.copies[y]["invalid"] == 0:
            request_key(s, count, y)
            return 1
    return 0


@fast
def shift(s, keys, count):
    """Set each row's shift to that of its copy in the batch."""
    if count == 0:
        return
    keys(s, count)
    for i in range(count):
        y = s.eval_copies[i]
        row = row_of(s, y)
        moved = s.eval_keys[i] - s.row_key[row * s["row_length"] + s.owned[y]["row_at"] - 1]
        if s.least_order[row] != NO_KEY:
            s.least_key[row] += moved - s.row_shift[row]
        s.row_shift[row] = moved


# the smallest key per row


@fast
def mark_row(s, row):
    """Mark a row whose smallest key must be searched again."""
    if s.row_marked[row] == 0:
        s.row_marked[row] = 1
        s.marked_rows[s["ranking"]["rows_marked"]] = row
        s["ranking"]["rows_marked"] += 1


@called
def compare_rows(s):
    """Search marked rows for their smallest keys."""
    for i in range(s["ranking"]["rows_marked"]):
        row = s.marked_rows[i]
        s.row_marked[row], first = 0, row * s["row_length"]
        key, order = smallest_entry(s.row_key, s.row_order, first, first + s.row_count[row])
        s.least_key[row] = key if order == NO_KEY else key + s.row_shift[row]
        s.least_order[row] = order
    s["ranking"]["rows_marked"] = 0


@fast
def smallest_entry(keys, orders, first, last):
    """Return the smallest (key, order) at positions [first, last), or NO_KEY twice if there are none."""
    key, order = NO_KEY, NO_KEY
    for i in range(first, last):
        if keys[i] < key or (keys[i] == key and orders[i] < order):
            key, order = keys[i], orders[i]
    return key, order


# reset


@called
def clear_ranking(s):
    """Remove all candidates and invalidate all keys; make every copy and every pool's node a ring of itself."""
    s["ranking"]["invalid_now"], s["ranking"]["rows_marked"] = 0, 0
    for y in range(s["n_copies"]):
        s.owned[y]["row_at"], s.copies[y]["invalid"] = 0, 0
    for row in range(s["n_ranks"]):
        s.least_key[row], s.least_order[row], s.row_marked[row] = NO_KEY, NO_KEY, 0
        s.member_count[row], s.row_count[row], s.keyed_pass[row] = 0, 0, NEVER_LEFT
        s.keyed_scope[row] = 0 if s["key_scope"] == TOUCH else NEVER_LEFT
    for pool in range(s["n_pools"]):
        s.pools[pool]["scope"] = NEVER_LEFT
    for node in range(s["n_queued"]):
        s.copies[node]["behind"], s.copies[node]["in_front"] = node, node


# queues in place of keys

NO_QUEUE, BY_LAST_USE, BY_ENTRY = range(len(QUEUES))


@fast
def move_last(s, y):
    """Move copy y to the end of its pool's queue."""
    unlink(s, y)
    node = s["n_copies"] + pool_of(s, y)
    last = np.int64(s.copies[node]["in_front"])
    s.copies[last]["behind"], s.copies[y]["in_front"] = y, last
    s.copies[y]["behind"], s.copies[node]["in_front"] = node, y


@fast
def leave_queue(s, y):
    """Remove copy y from its queue, as a ring of itself."""
    unlink(s, y)
    s.copies[y]["behind"], s.copies[y]["in_front"] = y, y


@fast
def unlink(s, y):
    """Link the copies before and behind copy y to each other."""
    before, after = np.int64(s.copies[y]["in_front"]), np.int64(s.copies[y]["behind"])
    s.copies[before]["behind"], s.copies[after]["in_front"] = after, before


@fast
def following(s, y):
    """Return the copy behind copy y, or behind a pool's node, in its queue."""
    return np.int64(s.copies[y]["behind"])


# The expert table: demand, uses, predictions with their logical timestamps, and next uses.

on_predict = notifier("on_predict")


@fast
def mark_needed(s, x, mass):
    """Mark expert x as demanded, and add its gate weight."""
    if s["reads_need"] == 1:
        s.experts[x]["needed"] = 1
        s.experts[x]["mass_ever"] += mass


@fast
def clear_needed(s, x):
    """Clear the demand for expert x: it has run, or does not run from the fast tier."""
    if s["reads_need"] == 1:
        s.experts[x]["needed"] = 0
        if s["keys_read_demand"] == 1:
            invalidate_expert(s, x)


@fast
def update_next_use(s, x, n):
    """Update the next use of expert x, the n-th demanded of this step."""
    s.experts[x]["next_use"] = s.demand_next[n]
    if s["reads_passes"] == 1:
        s.experts[x]["next_pass"] = s.demand_pass[n]


@fast
def set_timestamp(s, x):
    """Set the next logical timestamp, at a use or the arrival of a prefetch."""
    touch(s, x)
    if s["keeps_uses"] == 1:
        s.experts[x]["last_pass"] = s.now["pass"]


@fast
def touch(s, x):
    """Make expert x the most recently used."""
    s["uses"]["timestamps"] += 1
    s.copies[first_copy(s, x)]["last_use"] = s["uses"]["timestamps"]
    if s["queue"] == BY_LAST_USE and (s["n_resident"] == 0 or s.owned[x]["for_good"] == 0):
        move_last(s, x)


@fast
def count_use(s, x, y):
    """Count a use of expert x, by its copy y, whose arrival may have been counted as this use."""
    touch(s, x)
    if s["keeps_uses"] == 1:
        expert, counted = s.experts[x], s.copies[y]["prefetched"] * s.owned[y]["counted"]
        expert["last_pass"] = s.now["pass"]
        expert["uses_ever"] += 1
        expert["uses_here"] = max(1, expert["uses_here"] + 1 - counted)


@fast
def count_first_use(s, x):
    """Count the arrival of a prefetch as the first use of expert x since it became resident."""
    s.experts[x]["uses_here"] = 1


@fast
def forget_uses(s, x):
    """Clear the uses of expert x, which has no copy left."""
    s.experts[x]["uses_here"] = 0


@fast
def predict(s, hooks, y):
    """Record the prediction of a resident copy, with the next logical timestamp."""
    x = expert_of(s, y)
    s["uses"]["timestamps"] += 1
    if s["keeps_predictions"] == 1:
        s.experts[x]["last_prediction"], s.experts[x]["prediction_pass"] = s["uses"]["timestamps"], s.now["pass"]
    if s["keys_read_predictions"] == 1:
        invalidate_expert(s, x)
    if s["listeners_on_predict"] != 0:
        on_predict(s, hooks, y)


@called
def clear_uses(s):
    """Clear uses and predictions; oracle information stays."""
    s["uses"]["timestamps"] = 0
    for x in range(s["n_experts"]):
        row = s.experts[x]
        row["last_pass"], row["prediction_pass"], row["last_prediction"] = -1, -1, 0
        row["uses_ever"], row["uses_here"], row["mass_ever"], row["needed"] = 0, 0, 0, 0
        s.copies[first_copy(s, x)]["last_use"] = 0
