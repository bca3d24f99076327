"""Victim selection by key: the smallest (key, logical timestamp, copy) among those that may leave.

Keys of candidates stand in rows, one per layer, beside their orders: timestamp and copy in one number. Every layer
keeps the smallest of its own; going along a short row took half the time of a tournament tree. What happens to a copy
only marks its key as invalid; keys are evaluated, a batch at a time, when a victim is wanted next, and then only layers
that have lost their smallest are searched again. A layer is its own pool or a part of the one pool.

A policy declares the scope in which the key of an untouched copy stays valid. `touch`: for ever. `pass`, `step`: until
that scope moves on. `layer`: within a pass the keys of a layer's copies all move by as much, so that one of them is
evaluated anew. Rows hold keys less `layer_shift`, by which their layer has moved.
"""

from __future__ import annotations

import numpy as np

from moereplay.policies.contract import KEY_SCOPES
from moereplay.simulator.compiled.state import (
    NEVER_LEFT,
    NO_KEY,
    answers,
    asked,
    copies,
    expert_of,
    experts,
    invalid_copies,
    keyed_pass,
    keyed_scope,
    layer_key,
    layer_marked,
    layer_of,
    layer_order,
    layer_shift,
    marked_layers,
    member_count,
    members,
    now,
    owned,
    pools,
    row_count,
    row_key,
    row_order,
)
from moereplay.simulator.jit.marks import called, fast

TOUCH, LAYER, STEP, PASS = range(len(KEY_SCOPES))


# invalid keys


@fast
def invalidate_expert(s, x):
    """Something happened to expert x."""
    if s["precisions"] == 1:
        invalidate(s, x)
    else:
        invalidate_copies(s, x)


@called
def invalidate_copies(s, x):
    """Something happened to an expert with several precisions."""
    first = x * s["precisions"]
    for y in range(first, first + s["precisions"]):
        invalidate(s, y)


@fast
def invalidate(s, y):
    """Something happened to a copy: its key is evaluated anew before the next choice."""
    mine = owned(s)[y]
    if s["ranks"] == 1 and mine["member"] == 1 and mine["invalid"] == 0:
        mine["invalid"] = 1
        invalid_copies(s)[s["ranking"]["invalid_now"]] = y
        s["ranking"]["invalid_now"] += 1


# members of a pool


@called
def add_member(s, y):
    """Its key counts from now on, if it is a candidate."""
    if s["key_scope"] != TOUCH:
        layer = layer_of(s, y)
        owned(s)[y]["member_at"] = member_count(s)[layer]
        members(s)[layer * s["row_length"] + member_count(s)[layer]] = y
        member_count(s)[layer] += 1
    if copies(s)[y]["protected"] == 0:  # else it is invalidated when it is unpinned
        invalidate(s, y)


@called
def remove_member(s, y):
    """Its key does not count any more."""
    if s["key_scope"] != TOUCH:
        forget_member(s, y)
    leave_row(s, y)


@called
def forget_member(s, y):
    """Out of its layer's list; the last takes its place."""
    layer, place = layer_of(s, y), owned(s)[y]["member_at"]
    base = layer * s["row_length"]
    member_count(s)[layer] -= 1
    last = members(s)[base + member_count(s)[layer]]
    members(s)[base + place] = last
    owned(s)[last]["member_at"] = place


# the choice


@called
def smallest(s, keys, pool):
    """The candidate of the pool that leaves first; there must be one."""
    if s["key_scope"] != TOUCH:
        renew(s, keys, pool, scope_of(s))
    if s["ranking"]["invalid_now"] > 0:
        rank_invalid(s, keys)
    if s["ranking"]["layers_marked"] > 0:
        compare_layers(s)
    if s["per_layer"] == 1:
        return copy_in(s, layer_order(s)[pool])
    return copy_in(s, first_of(layer_key(s), layer_order(s), 0, s["layers"])[1])


@fast
def scope_of(s):
    """A number that changes when the key of an untouched copy may."""
    if s["key_scope"] == PASS:
        return now(s)["pass"]
    return now(s)["step"] * 2 + now(s)["gated"]


@called
def rank_invalid(s, keys):
    """Rank what something happened to, and take out what may not leave now."""
    count = 0
    for i in range(s["ranking"]["invalid_now"]):
        y = invalid_copies(s)[i]
        if owned(s)[y]["invalid"] == 1:  # else ranked with its layer meanwhile
            owned(s)[y]["invalid"] = 0
            count += key_or_leave_row(s, y, count)
    s["ranking"]["invalid_now"] = 0
    rank(s, keys, count)


@fast
def key_or_leave_row(s, y, count):
    """1 if y is now the `count`-th to be asked about; else it leaves its row."""
    if may_leave(s, y):
        ask(s, count, y)
        return 1
    leave_row(s, y)
    return 0


@fast
def ask(s, at, y):
    """The key of copy y is wanted: the `at`-th of the next batch."""
    asked(s)[at] = y


@called
def rank(s, keys, count):
    """Give what was asked about its key and its order."""
    if count == 0:
        return
    keys(s, count)
    for i in range(count):
        y, key = asked(s)[i], answers(s)[i]
        at, order = row_place(s, y), experts(s)[expert_of(s, y)]["last_use"] * s["n_ring"] + y
        row_key(s)[at], row_order(s)[at] = key - layer_shift(s)[layer_of(s, y)], order
        challenge(s, layer_of(s, y), y, key, order)


@fast
def may_leave(s, y):
    """Whether it is a candidate."""
    return owned(s)[y]["member"] == 1 and copies(s)[y]["protected"] == 0


@fast
def copy_in(s, order):
    """Whose order it is: the copy is in the low bits, as `n_ring` is a power of two and larger than any."""
    return order & (s["n_ring"] - 1)


@fast
def row_place(s, y):
    """Where it stands in its layer's row: at the end, if it was not there yet."""
    mine, layer = owned(s)[y], layer_of(s, y)
    if mine["row_at"] == 0:
        row_count(s)[layer] += 1
        mine["row_at"] = row_count(s)[layer]
    return layer * s["row_length"] + mine["row_at"] - 1


@fast
def challenge(s, layer, y, key, order):
    """It may be its layer's winner now; if it was already, another one may be."""
    best_key, best = layer_key(s)[layer], layer_order(s)[layer]
    if copy_in(s, best) == y:  # none is of NO_KEY
        mark_layer(s, layer)
    elif key < best_key or (key == best_key and order < best):
        layer_key(s)[layer], layer_order(s)[layer] = key, order


@fast
def leave_row(s, y):
    """Take it out of its row; the last of the row takes its place."""
    mine, layer = owned(s)[y], layer_of(s, y)
    if mine["row_at"] == 0:
        return
    row_count(s)[layer] -= 1
    at, last = layer * s["row_length"] + mine["row_at"] - 1, layer * s["row_length"] + row_count(s)[layer]
    row_key(s)[at], row_order(s)[at] = row_key(s)[last], row_order(s)[last]
    owned(s)[copy_in(s, row_order(s)[last])]["row_at"] = mine["row_at"]
    mine["row_at"] = 0
    if copy_in(s, layer_order(s)[layer]) == y:
        mark_layer(s, layer)


# scopes that move on


@fast
def renew(s, keys, pool, scope):
    """What is of an older scope: the pool, and where there are several the layers that are about to be ranked."""
    if pools(s)[pool]["scope"] != scope:
        if s["per_layer"] == 1:
            renew_layers(s, keys, pool, pool + 1, scope)
        else:
            renew_layers(s, keys, 0, s["layers"], scope)
        pools(s)[pool]["scope"] = scope
    if s["per_layer"] == 1:
        renew_invalid_layers(s, keys, scope)


@called
def renew_invalid_layers(s, keys, scope):
    """Those of which a copy waits to be ranked beside the others; not if it only goes."""
    for i in range(s["ranking"]["invalid_now"]):
        y = invalid_copies(s)[i]
        if owned(s)[y]["invalid"] == 1 and may_leave(s, y):
            renew_layers(s, keys, layer_of(s, y), layer_of(s, y) + 1, scope)


@called
def renew_layers(s, keys, first, last, scope):
    """New keys for layers [first, last), or by how much they all moved."""
    count = 0
    for layer in range(first, last):
        stays = s["key_scope"] == LAYER and keyed_pass(s)[layer] == now(s)["pass"]
        if keyed_scope(s)[layer] != scope and not stays:
            renew_layer(s, keys, layer, scope)
    for layer in range(first, last):
        if keyed_scope(s)[layer] != scope:
            count += key_untouched(s, layer, count)
            keyed_scope(s)[layer] = scope
    shift(s, keys, count)


@called
def renew_layer(s, keys, layer, scope):
    """New keys for all candidates of a layer."""
    base, count = layer * s["row_length"], 0
    layer_shift(s)[layer] = 0
    for i in range(base, base + member_count(s)[layer]):
        y = np.int64(members(s)[i])
        owned(s)[y]["invalid"] = 0  # and stays in the list until that is worked off
        count += key_or_leave_row(s, y, count)
    rank(s, keys, count)
    keyed_scope(s)[layer], keyed_pass(s)[layer] = scope, now(s)["pass"]


@fast
def key_untouched(s, layer, count):
    """1 if the layer has a copy that nothing happened to, which is now the `count`-th to be asked about."""
    for at in range(layer * s["row_length"], layer * s["row_length"] + row_count(s)[layer]):
        y = copy_in(s, row_order(s)[at])
        if owned(s)[y]["invalid"] == 0:
            ask(s, count, y)
            return 1
    return 0


@fast
def shift(s, keys, count):
    """Layers move by as much as those of their copies that are asked about."""
    if count == 0:
        return
    keys(s, count)
    for i in range(count):
        y = asked(s)[i]
        layer = layer_of(s, y)
        moved = answers(s)[i] - row_key(s)[layer * s["row_length"] + owned(s)[y]["row_at"] - 1]
        if layer_order(s)[layer] != NO_KEY:
            layer_key(s)[layer] += moved - layer_shift(s)[layer]
        layer_shift(s)[layer] = moved


# layers


@fast
def mark_layer(s, layer):
    """Its winner may be another one, or have another key."""
    if layer_marked(s)[layer] == 0:
        layer_marked(s)[layer] = 1
        marked_layers(s)[s["ranking"]["layers_marked"]] = layer
        s["ranking"]["layers_marked"] += 1


@called
def compare_layers(s):
    """The winners of the layers that changed, and what they win with."""
    for i in range(s["ranking"]["layers_marked"]):
        layer = marked_layers(s)[i]
        layer_marked(s)[layer] = 0
        first = layer * s["row_length"]
        key, order = first_of(row_key(s), row_order(s), first, first + row_count(s)[layer])
        layer_key(s)[layer] = key if order == NO_KEY else key + layer_shift(s)[layer]
        layer_order(s)[layer] = order
    s["ranking"]["layers_marked"] = 0


@fast
def first_of(keys, orders, first, last):
    """The smallest (key, order) of places [first, last); NO_KEY twice if there are none."""
    key, order = NO_KEY, NO_KEY
    for i in range(first, last):
        if keys[i] < key or (keys[i] == key and orders[i] < order):
            key, order = keys[i], orders[i]
    return key, order


# a reset


@called
def clear_ranking(s):
    """No candidates, and no key is valid."""
    s["ranking"]["invalid_now"], s["ranking"]["layers_marked"] = 0, 0
    for y in range(s["n_copies"]):
        owned(s)[y]["row_at"], owned(s)[y]["invalid"] = 0, 0
    for layer in range(s["layers"]):
        layer_key(s)[layer], layer_order(s)[layer], layer_marked(s)[layer] = NO_KEY, NO_KEY, 0
        member_count(s)[layer], row_count(s)[layer], keyed_pass(s)[layer] = 0, 0, NEVER_LEFT
        keyed_scope(s)[layer] = 0 if s["key_scope"] == TOUCH else NEVER_LEFT
    for pool in range(s["n_pools"]):
        pools(s)[pool]["scope"] = NEVER_LEFT
