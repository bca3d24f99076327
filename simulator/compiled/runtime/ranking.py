"""Who leaves first: the smallest (key, stamp, copy) among those that may leave.

Keys of what may leave stand in rows, one per layer, beside their orders: stamp and copy in one number. Every layer
keeps the smallest of its own; going along a short row took half the time of a tournament tree. What happens to a copy
only marks it as dirty; it is ranked, or taken out, when a victim is wanted next, and then only layers that have lost
their smallest are looked at again. A layer is its own pool or a part of the one pool.

A policy declares when the key of an untouched copy may change. `touch`: never. `pass`, `step`: a layer is ranked anew
when a victim is wanted and that scope has moved on. `layer`: within a pass the keys of a layer's copies all move by as
much, so that one of them is asked about anew. Rows hold keys less `layer_shift`, by which their layer has moved.
"""

from __future__ import annotations

import numpy as np

from policies.contract import REKEY
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.state import (
    NO_KEY,
    answers,
    asked,
    copies,
    dirty,
    expert_of,
    experts,
    keyed_pass,
    keyed_scope,
    layer_key,
    layer_marked,
    layer_of,
    layer_order,
    layer_shift,
    leaf_count,
    leaf_key,
    leaf_order,
    marked_layers,
    member_count,
    members,
    now,
    owned,
    pools,
)

TOUCH, LAYER, STEP, PASS = range(len(REKEY))


# what happens to copies


@fast
def touch(w, x):
    """Something happened to expert x."""
    if w["by_key"] == 1:
        if w["precisions"] == 1:
            disturb(w, x)
        else:
            touch_copies(w, x)


@called
def touch_copies(w, x):
    """Of an expert with several precisions."""
    first = x * w["precisions"]
    for y in range(first, first + w["precisions"]):
        disturb(w, y)


@fast
def disturb(w, y):
    """Something happened to a copy: it is ranked anew before the next choice."""
    mine = owned(w)[y]
    if mine["member"] == 1 and mine["dirty"] == 0:
        mine["dirty"] = 1
        dirty(w)[w["disturbed"]] = y
        w["disturbed"] += 1


@called
def join_pool(w, y):
    """It occupies room from now on."""
    mine, copy = owned(w)[y], copies(w)[y]
    mine["member"] = 1
    if copy["protected"] == 0:
        pools(w)[copy["pool"]]["open"] += copy["bytes"]
    if w["by_key"] == 0:
        return
    if w["rekey"] != TOUCH:
        layer = layer_of(w, y)
        mine["place"] = member_count(w)[layer]
        members(w)[layer * w["leaves"] + member_count(w)[layer]] = y
        member_count(w)[layer] += 1
    if copy["protected"] == 0:  # else it is disturbed when that ends
        disturb(w, y)


@called
def leave_pool(w, y):
    """It occupies none any more."""
    mine, copy = owned(w)[y], copies(w)[y]
    mine["member"] = 0
    if copy["protected"] == 0:
        pools(w)[copy["pool"]]["open"] -= copy["bytes"]
    if w["by_key"] == 0:
        return
    if w["rekey"] != TOUCH:
        forget_member(w, y)
    vacate(w, y)


@called
def forget_member(w, y):
    """Out of its layer's list; the last takes its place."""
    layer, place = layer_of(w, y), owned(w)[y]["place"]
    base = layer * w["leaves"]
    member_count(w)[layer] -= 1
    last = members(w)[base + member_count(w)[layer]]
    members(w)[base + place] = last
    owned(w)[last]["place"] = place


@fast
def is_candidate(w, y):
    """Whether it may leave."""
    return owned(w)[y]["member"] == 1 and copies(w)[y]["protected"] == 0


# the choice


@called
def smallest(w, keys, pool):
    """The candidate of the pool that leaves first; there must be one."""
    if w["rekey"] != TOUCH:
        renew(w, keys, pool, scope_of(w))
    if w["disturbed"] > 0:
        rank_disturbed(w, keys)
    if w["layers_marked"] > 0:
        compare_layers(w)
    if w["per_layer"] == 1:
        return who(w, layer_order(w)[pool])
    return who(w, first_of(layer_key(w), layer_order(w), 0, w["layers"])[1])


@fast
def scope_of(w):
    """A number that changes when the key of an untouched copy may."""
    if w["rekey"] == PASS:
        return now(w)["pass"]
    return now(w)["step"] * 2 + now(w)["gated"]


@called
def rank_disturbed(w, keys):
    """Rank what something happened to, and take out what may not leave now."""
    count = 0
    for i in range(w["disturbed"]):
        y = dirty(w)[i]
        if owned(w)[y]["dirty"] == 1:  # else ranked with its layer meanwhile
            owned(w)[y]["dirty"] = 0
            count += candidate_or_out(w, y, count)
    w["disturbed"] = 0
    rank(w, keys, count)


@fast
def candidate_or_out(w, y, count):
    """1 if y is now the `count`-th to be asked about; else it does not stand among the leaves."""
    if is_candidate(w, y):
        asked(w)[count] = y
        return 1
    vacate(w, y)
    return 0


@called
def rank(w, keys, count):
    """Give what was asked about its key and its order."""
    if count == 0:
        return
    keys(w, count)
    for i in range(count):
        y, key = asked(w)[i], answers(w)[i]
        at, order = place_of(w, y), experts(w)[expert_of(w, y)]["last_use"] * w["n_ring"] + y
        leaf_key(w)[at], leaf_order(w)[at] = key - layer_shift(w)[layer_of(w, y)], order
        challenge(w, layer_of(w, y), y, key, order)


@fast
def who(w, order):
    """Whose order it is: the copy is in the low bits, as `n_ring` is a power of two and larger than any."""
    return order & (w["n_ring"] - 1)


@fast
def place_of(w, y):
    """Where it stands among the leaves: at the end of its layer's row, if it did not stand there yet."""
    mine, layer = owned(w)[y], layer_of(w, y)
    if mine["leaf"] == 0:
        leaf_count(w)[layer] += 1
        mine["leaf"] = leaf_count(w)[layer]
    return layer * w["leaves"] + mine["leaf"] - 1


@fast
def challenge(w, layer, y, key, order):
    """It may be its layer's winner now; if it was already, another one may be."""
    best_key, best = layer_key(w)[layer], layer_order(w)[layer]
    if who(w, best) == y:  # none is of NO_KEY
        mark_layer(w, layer)
    elif key < best_key or (key == best_key and order < best):
        layer_key(w)[layer], layer_order(w)[layer] = key, order


@fast
def vacate(w, y):
    """Take it out of its row; the last of the row takes its place."""
    mine, layer = owned(w)[y], layer_of(w, y)
    if mine["leaf"] == 0:
        return
    leaf_count(w)[layer] -= 1
    at, last = layer * w["leaves"] + mine["leaf"] - 1, layer * w["leaves"] + leaf_count(w)[layer]
    leaf_key(w)[at], leaf_order(w)[at] = leaf_key(w)[last], leaf_order(w)[last]
    owned(w)[who(w, leaf_order(w)[last])]["leaf"] = mine["leaf"]
    mine["leaf"] = 0
    if who(w, layer_order(w)[layer]) == y:
        mark_layer(w, layer)


# scopes that move on


@fast
def renew(w, keys, pool, scope):
    """What is of an older scope: the pool, and where there are several the layers that are about to be ranked."""
    if pools(w)[pool]["scope"] != scope:
        if w["per_layer"] == 1:
            renew_layers(w, keys, pool, pool + 1, scope)
        else:
            renew_layers(w, keys, 0, w["layers"], scope)
        pools(w)[pool]["scope"] = scope
    if w["per_layer"] == 1:
        renew_disturbed_layers(w, keys, scope)


@called
def renew_disturbed_layers(w, keys, scope):
    """Those of which a copy waits to be ranked beside the others; not if it only goes."""
    for i in range(w["disturbed"]):
        y = dirty(w)[i]
        if owned(w)[y]["dirty"] == 1 and is_candidate(w, y):
            renew_layers(w, keys, layer_of(w, y), layer_of(w, y) + 1, scope)


@called
def renew_layers(w, keys, first, last, scope):
    """New keys for layers [first, last), or by how much they all moved."""
    count = 0
    for layer in range(first, last):
        stays = w["rekey"] == LAYER and keyed_pass(w)[layer] == now(w)["pass"]
        if keyed_scope(w)[layer] != scope and not stays:
            renew_layer(w, keys, layer, scope)
    for layer in range(first, last):
        if keyed_scope(w)[layer] != scope:
            count += ask_untouched(w, layer, count)
            keyed_scope(w)[layer] = scope
    shift(w, keys, count)


@called
def renew_layer(w, keys, layer, scope):
    """New keys for all candidates of a layer."""
    base, count = layer * w["leaves"], 0
    layer_shift(w)[layer] = 0
    for i in range(base, base + member_count(w)[layer]):
        y = np.int64(members(w)[i])
        owned(w)[y]["dirty"] = 0  # and stays in the list until that is worked off
        count += candidate_or_out(w, y, count)
    rank(w, keys, count)
    keyed_scope(w)[layer], keyed_pass(w)[layer] = scope, now(w)["pass"]


@fast
def ask_untouched(w, layer, count):
    """1 if the layer has a copy that nothing happened to, which is now the `count`-th to be asked about."""
    for at in range(layer * w["leaves"], layer * w["leaves"] + leaf_count(w)[layer]):
        y = who(w, leaf_order(w)[at])
        if owned(w)[y]["dirty"] == 0:
            asked(w)[count] = y
            return 1
    return 0


@fast
def shift(w, keys, count):
    """Layers move by as much as those of their copies that are asked about."""
    if count == 0:
        return
    keys(w, count)
    for i in range(count):
        y = asked(w)[i]
        layer = layer_of(w, y)
        moved = answers(w)[i] - leaf_key(w)[layer * w["leaves"] + owned(w)[y]["leaf"] - 1]
        if layer_order(w)[layer] != NO_KEY:
            layer_key(w)[layer] += moved - layer_shift(w)[layer]
        layer_shift(w)[layer] = moved


# layers


@fast
def mark_layer(w, layer):
    """Its winner may be another one, or have another key."""
    if layer_marked(w)[layer] == 0:
        layer_marked(w)[layer] = 1
        marked_layers(w)[w["layers_marked"]] = layer
        w["layers_marked"] += 1


@called
def compare_layers(w):
    """The winners of the layers that changed, and what they win with."""
    for i in range(w["layers_marked"]):
        layer = marked_layers(w)[i]
        layer_marked(w)[layer] = 0
        first = layer * w["leaves"]
        key, order = first_of(leaf_key(w), leaf_order(w), first, first + leaf_count(w)[layer])
        layer_key(w)[layer] = key if order == NO_KEY else key + layer_shift(w)[layer]
        layer_order(w)[layer] = order
    w["layers_marked"] = 0


@fast
def first_of(keys, orders, first, last):
    """The smallest (key, order) of places [first, last); NO_KEY twice if there are none."""
    key, order = NO_KEY, NO_KEY
    for i in range(first, last):
        if keys[i] < key or (keys[i] == key and orders[i] < order):
            key, order = keys[i], orders[i]
    return key, order
