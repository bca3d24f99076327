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
    behind,
    copies,
    eval_copies,
    eval_keys,
    expert_of,
    experts,
    in_front,
    invalid_copies,
    keyed_pass,
    keyed_scope,
    layer_of,
    least_key,
    least_order,
    marked_rows,
    member_count,
    members,
    now,
    owned,
    pool_of,
    pools,
    row_count,
    row_key,
    row_marked,
    row_order,
    row_shift,
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
    mine = owned(s)[y]
    if s["ranks"] == 1 and mine["member"] == 1 and mine["invalid"] == 0:
        mine["invalid"] = 1
        invalid_copies(s)[s["ranking"]["invalid_now"]] = y
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
        owned(s)[y]["member_at"] = member_count(s)[row]
        members(s)[row * s["row_length"] + member_count(s)[row]] = y
        member_count(s)[row] += 1
    if copies(s)[y]["protected"] == 0:  # else `unpin` invalidates it
        invalidate(s, y)


@called
def remove_member(s, y):
    """Remove copy y from the members and candidates of its row."""
    if s["key_scope"] != TOUCH:
        row, at = row_of(s, y), owned(s)[y]["member_at"]
        base = row * s["row_length"]
        member_count(s)[row] -= 1
        last = members(s)[base + member_count(s)[row]]
        members(s)[base + at] = last  # the order of members is free, so the last one fills the gap
        owned(s)[last]["member_at"] = at
    leave_row(s, y)


# selection


@called
def smallest(s, keys, pool):
    """Return the first victim of a pool that has candidates."""
    if s["key_scope"] != TOUCH:
        refresh_keys(s, keys, pool, scope_of(s))
    if s["ranking"]["invalid_now"] > 0:
        rank_invalid(s, keys)
    if s["ranking"]["rows_marked"] > 0:
        compare_rows(s)
    first = pool * s["pool_rows"]
    return copy_of_order(s, smallest_entry(least_key(s), least_order(s), first, first + s["pool_rows"])[1])


@fast
def scope_of(s):
    """Return a number that changes when keys of copies without changes may."""
    if s["key_scope"] == PASS:
        return now(s)["pass"]
    return now(s)["step"] * 2 + now(s)["gated"]


@called
def rank_invalid(s, keys):
    """Evaluate invalid keys, and remove copies that are no longer candidates."""
    count = 0
    for i in range(s["ranking"]["invalid_now"]):
        y = invalid_copies(s)[i]
        if owned(s)[y]["invalid"] == 1:  # else `refresh_layer` has ranked it
            owned(s)[y]["invalid"] = 0
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
    eval_copies(s)[at] = y


@called
def rank(s, keys, count):
    """Evaluate a batch of keys and store them with their orders."""
    if count == 0:
        return
    keys(s, count)
    for i in range(count):
        y, key = eval_copies(s)[i], eval_keys(s)[i]
        at, order = row_place(s, y), experts(s)[expert_of(s, y)]["last_use"] * s["n_ring"] + y
        row_key(s)[at], row_order(s)[at] = key - row_shift(s)[row_of(s, y)], order
        update_minimum(s, row_of(s, y), y, key, order)


@fast
def is_candidate(s, y):
    """Return whether copy y is a candidate."""
    return owned(s)[y]["member"] == 1 and copies(s)[y]["protected"] == 0


@fast
def copy_of_order(s, order):
    """Return the copy in the low bits of an order; `n_ring` is a power of two above all copies."""
    return order & (s["n_ring"] - 1)


@fast
def row_place(s, y):
    """Return the position of copy y in its row, appending it if it has none."""
    mine, row = owned(s)[y], row_of(s, y)
    if mine["row_at"] == 0:
        row_count(s)[row] += 1
        mine["row_at"] = row_count(s)[row]
    return row * s["row_length"] + mine["row_at"] - 1


@fast
def update_minimum(s, row, y, key, order):
    """Update its row's smallest key with copy y's; mark the row if copy y held the smallest."""
    best_key, best = least_key(s)[row], least_order(s)[row]
    # a new key of the smallest copy may no longer be the smallest
    if copy_of_order(s, best) == y:  # NO_KEY is the order of no copy
        mark_row(s, row)
    elif key < best_key or (key == best_key and order < best):
        least_key(s)[row], least_order(s)[row] = key, order


@fast
def leave_row(s, y):
    """Remove copy y from its row; the last entry takes its place."""
    mine, row = owned(s)[y], row_of(s, y)
    if mine["row_at"] == 0:
        return
    row_count(s)[row] -= 1
    at, last = row * s["row_length"] + mine["row_at"] - 1, row * s["row_length"] + row_count(s)[row]
    row_key(s)[at], row_order(s)[at] = row_key(s)[last], row_order(s)[last]
    owned(s)[copy_of_order(s, row_order(s)[last])]["row_at"] = mine["row_at"]
    mine["row_at"] = 0
    if copy_of_order(s, least_order(s)[row]) == y:
        mark_row(s, row)


# key-validity scopes


@fast
def refresh_keys(s, keys, pool, scope):
    """Refresh keys of an older scope: the pool's, and with several pools those of rows about to be ranked."""
    if pools(s)[pool]["scope"] != scope:
        refresh_rows(s, keys, pool * s["pool_rows"], (pool + 1) * s["pool_rows"], scope)
        pools(s)[pool]["scope"] = scope
    if s["pooled"] != ONE_POOL:
        refresh_invalid_rows(s, keys, scope)


@called
def refresh_invalid_rows(s, keys, scope):
    """Refresh rows in which an invalid copy will be ranked among others."""
    for i in range(s["ranking"]["invalid_now"]):
        y = invalid_copies(s)[i]
        if owned(s)[y]["invalid"] == 1 and is_candidate(s, y):
            refresh_rows(s, keys, row_of(s, y), row_of(s, y) + 1, scope)


@called
def refresh_rows(s, keys, first, last, scope):
    """Refresh rows [first, last): evaluate all keys, or one per row to learn the common shift."""
    count = 0
    for row in range(first, last):
        stays = s["key_scope"] == LAYER and keyed_pass(s)[row] == now(s)["pass"]
        if keyed_scope(s)[row] != scope and not stays:
            refresh_row(s, keys, row, scope)
    for row in range(first, last):
        if keyed_scope(s)[row] != scope:
            count += key_untouched(s, row, count)
            keyed_scope(s)[row] = scope
    shift(s, keys, count)


@called
def refresh_row(s, keys, row, scope):
    """Evaluate the keys of all candidates of a row."""
    base, count = row * s["row_length"], 0
    row_shift(s)[row] = 0
    for i in range(base, base + member_count(s)[row]):
        y = np.int64(members(s)[i])
        owned(s)[y]["invalid"] = 0  # it stays in the list; `rank_invalid` skips it
        count += key_or_leave_row(s, y, count)
    rank(s, keys, count)
    keyed_scope(s)[row], keyed_pass(s)[row] = scope, now(s)["pass"]


@fast
def key_untouched(s, row, count):
    """Return 1 and add a valid copy of the row to the batch at `count`; 0 if there is none."""
    for at in range(row * s["row_length"], row * s["row_length"] + row_count(s)[row]):
        y = copy_of_order(s, row_order(s)[at])
        if owned(s)[y]["invalid"] == 0:
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
        y = eval_copies(s)[i]
        row = row_of(s, y)
        moved = eval_keys(s)[i] - row_key(s)[row * s["row_length"] + owned(s)[y]["row_at"] - 1]
        if least_order(s)[row] != NO_KEY:
            least_key(s)[row] += moved - row_shift(s)[row]
        row_shift(s)[row] = moved


# the smallest key per row


@fast
def mark_row(s, row):
    """Mark a row whose smallest key must be searched again."""
    if row_marked(s)[row] == 0:
        row_marked(s)[row] = 1
        marked_rows(s)[s["ranking"]["rows_marked"]] = row
        s["ranking"]["rows_marked"] += 1


@called
def compare_rows(s):
    """Search marked rows for their smallest keys."""
    for i in range(s["ranking"]["rows_marked"]):
        row = marked_rows(s)[i]
        row_marked(s)[row], first = 0, row * s["row_length"]
        key, order = smallest_entry(row_key(s), row_order(s), first, first + row_count(s)[row])
        least_key(s)[row] = key if order == NO_KEY else key + row_shift(s)[row]
        least_order(s)[row] = order
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
    """Remove all candidates and invalidate all keys."""
    s["ranking"]["invalid_now"], s["ranking"]["rows_marked"] = 0, 0
    for y in range(s["n_copies"]):
        owned(s)[y]["row_at"], owned(s)[y]["invalid"] = 0, 0
    for row in range(s["n_ranks"]):
        least_key(s)[row], least_order(s)[row], row_marked(s)[row] = NO_KEY, NO_KEY, 0
        member_count(s)[row], row_count(s)[row], keyed_pass(s)[row] = 0, 0, NEVER_LEFT
        keyed_scope(s)[row] = 0 if s["key_scope"] == TOUCH else NEVER_LEFT
    for pool in range(s["n_pools"]):
        pools(s)[pool]["scope"] = NEVER_LEFT


# queues in place of keys

NO_QUEUE, BY_LAST_USE, BY_ENTRY = range(len(QUEUES))


@fast
def move_last(s, y):
    """Move copy y to the end of its pool's queue."""
    leave_queue(s, y)
    node = s["n_copies"] + pool_of(s, y)
    last = in_front(s)[node]
    behind(s)[last], in_front(s)[y] = y, last
    behind(s)[y], in_front(s)[node] = node, y


@fast
def leave_queue(s, y):
    """Remove copy y from its queue, as a ring of itself."""
    before, after = in_front(s)[y], behind(s)[y]
    behind(s)[before], in_front(s)[after] = after, before
    behind(s)[y], in_front(s)[y] = y, y


@fast
def first_of_queue(s, pool):
    """Return the first candidate of a pool's queue; there must be one."""
    y = behind(s)[s["n_copies"] + pool]
    while copies(s)[y]["protected"] == 1:
        y = behind(s)[y]
    return y


@called
def clear_queues(s):
    """Make every copy and every pool's node a ring of itself."""
    for node in range(s["n_queued"]):
        behind(s)[node], in_front(s)[node] = node, node
