"""Who leaves first: the smallest (key, stamp, copy) among those that may leave.

Keys and stamps of what may leave stand in rows, one per layer, and every layer keeps the smallest of its own: rows of
numbers are compared many at a time, without a branch, which took half the time of a tournament tree. What happens to a
copy only marks it as dirty; it is ranked, or taken out, when a victim is wanted next, and then only layers in which
something changed are looked at again. A layer is its own pool or a part of the one pool.

A policy declares when the key of an untouched copy may change. `touch`: never. `pass`, `step`: a layer is ranked anew
when a victim is wanted and that scope has moved on. `layer`: within a pass a layer's copies keep their order, so that
only the layers' winners are asked about anew, and a layer as a whole once something happens to one of its copies.
"""

from __future__ import annotations

import numpy as np

from policies.contract import NONE
from simulator.compiled.jit import called, fast
from simulator.compiled.state import (
    NO_KEY,
    all_answers,
    all_asked,
    all_copies,
    all_experts,
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
    layer_stamp,
    layer_who,
    leaf_count,
    leaf_key,
    leaf_stamp,
    leaf_who,
    marked_layers,
    member_count,
    members,
    now,
    own_eviction,
    owned,
    pools,
)

REKEY = ("touch", "layer", "step", "pass")
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
        renew_disturbed_layers(w, keys, scope_of(w))
    if w["disturbed"] > 0:
        rank_disturbed(w, keys)
    if w["rekey"] != TOUCH and pools(w)[pool]["scope"] != scope_of(w):
        renew_pool(w, keys, pool, scope_of(w))
    if w["layers_marked"] > 0:
        compare_layers(w, keys)
    if w["per_layer"] == 1:
        return layer_who(w)[pool]
    return layer_who(w)[first_layer(w)]


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
    """Give what was asked about its key and its stamp."""
    if count == 0:
        return
    ask(w, keys, count)
    for i in range(count):
        y = asked(w)[i]
        at = place_of(w, y)
        leaf_key(w)[at], leaf_stamp(w)[at] = answers(w)[i], experts(w)[expert_of(w, y)]["last_use"]
        mark_layer(w, layer_of(w, y))


@fast
def place_of(w, y):
    """Where it stands among the leaves: at the end of its layer's row, if it did not stand there yet."""
    mine, layer = owned(w)[y], layer_of(w, y)
    if mine["leaf"] == 0:
        leaf_count(w)[layer] += 1
        mine["leaf"] = leaf_count(w)[layer]
        leaf_who(w)[layer * w["leaves"] + mine["leaf"] - 1] = y
    return layer * w["leaves"] + mine["leaf"] - 1


@called
def ask(w, keys, count):
    """The policy's keys of the copies asked for."""
    keys(now(w), all_experts(w), all_copies(w), own_eviction(w), all_asked(w), count, all_answers(w))


@fast
def vacate(w, y):
    """Take it out of its row; the last of the row takes its place."""
    mine, layer = owned(w)[y], layer_of(w, y)
    if mine["leaf"] == 0:
        return
    leaf_count(w)[layer] -= 1
    at, last = layer * w["leaves"] + mine["leaf"] - 1, layer * w["leaves"] + leaf_count(w)[layer]
    leaf_key(w)[at], leaf_stamp(w)[at], leaf_who(w)[at] = leaf_key(w)[last], leaf_stamp(w)[last], leaf_who(w)[last]
    owned(w)[leaf_who(w)[last]]["leaf"] = mine["leaf"]
    mine["leaf"] = 0
    mark_layer(w, layer)


# scopes that move on


@called
def renew_disturbed_layers(w, keys, scope):
    """A layer whose keys are of an older scope is ranked as a whole once one of its copies is; not if one goes."""
    for i in range(w["disturbed"]):
        y = dirty(w)[i]
        layer = layer_of(w, y)
        if keyed_scope(w)[layer] != scope and owned(w)[y]["dirty"] == 1 and is_candidate(w, y):
            renew_layer(w, keys, layer, scope)


@called
def renew_layer(w, keys, layer, scope):
    """New keys for all candidates of a layer."""
    base, count = layer * w["leaves"], 0
    for i in range(base, base + member_count(w)[layer]):
        y = np.int64(members(w)[i])
        owned(w)[y]["dirty"] = 0  # and stays in the list until that is worked off
        count += candidate_or_out(w, y, count)
    rank(w, keys, count)
    keyed_scope(w)[layer], keyed_pass(w)[layer] = scope, now(w)["pass"]


@called
def renew_pool(w, keys, pool, scope):
    """New keys for a pool: for its layers' winners where order inside a layer stays, else for everything."""
    first, last = 0, w["layers"]
    if w["per_layer"] == 1:
        first, last = pool, pool + 1
    for layer in range(first, last):
        stays = w["rekey"] == LAYER and keyed_pass(w)[layer] == now(w)["pass"]
        if keyed_scope(w)[layer] != scope and not stays:
            renew_layer(w, keys, layer, scope)
    if w["rekey"] == LAYER:
        renew_winners(w, keys, first, last)
    pools(w)[pool]["scope"] = scope


@called
def renew_winners(w, keys, first, last):
    """New keys for the winners of layers [first, last); those that are about to be compared again get theirs then."""
    count = 0
    for layer in range(first, last):
        if layer_who(w)[layer] != NONE:
            asked(w)[count] = layer_who(w)[layer]
            count += 1
    crown(w, keys, count)


@called
def crown(w, keys, count):
    """Give layers' winners, which were asked about, their keys."""
    if count == 0:
        return
    ask(w, keys, count)
    for i in range(count):
        layer_key(w)[layer_of(w, asked(w)[i])] = answers(w)[i]


# layers


@fast
def mark_layer(w, layer):
    """Its winner may be another one, or have another key."""
    if layer_marked(w)[layer] == 0:
        layer_marked(w)[layer] = 1
        marked_layers(w)[w["layers_marked"]] = layer
        w["layers_marked"] += 1


@called
def compare_layers(w, keys):
    """The winners of the layers that changed, and what they win with."""
    count = 0
    for i in range(w["layers_marked"]):
        layer = marked_layers(w)[i]
        layer_marked(w)[layer] = 0
        compare_layer(w, layer)
        if w["rekey"] == LAYER and layer_who(w)[layer] != NONE and keyed_scope(w)[layer] != scope_of(w):
            asked(w)[count] = layer_who(w)[layer]
            count += 1
    w["layers_marked"] = 0
    crown(w, keys, count)  # who won with a key of an older scope


@called
def compare_layer(w, layer):
    """The smallest (key, stamp, copy) of a layer."""
    first, count = layer * w["leaves"], leaf_count(w)[layer]
    if count == 0:
        layer_key(w)[layer], layer_who(w)[layer] = NO_KEY, NONE
        return
    at = first_of(leaf_key(w), leaf_stamp(w), leaf_who(w), first, first + count)
    layer_key(w)[layer], layer_stamp(w)[layer], layer_who(w)[layer] = (
        leaf_key(w)[at],
        leaf_stamp(w)[at],
        leaf_who(w)[at],
    )


@fast
def first_layer(w):
    """The layer whose winner leaves first."""
    return first_of(layer_key(w), layer_stamp(w), layer_who(w), 0, w["layers"])


@fast
def first_of(keys, stamps, who, first, last):
    """The place in [first, last) of the smallest key, among those of the smallest stamp, and then of the lowest copy.

    Loops without a branch, as compilers turn them into vector instructions: numbers are read before it is asked
    whether they count. Part of its callers, so that these know the arrays (see `jit.array_reader`).
    """
    key = NO_KEY
    for i in range(first, last):
        key = min(key, keys[i])
    equal, place = 0, 0
    for i in range(first, last):
        k = keys[i]
        equal += 1 if k == key else 0
        place += i if k == key else 0
    if equal == 1:
        return place
    return first_of_equals(keys, stamps, who, key, first, last)


@fast
def first_of_equals(keys, stamps, who, key, first, last):
    """Among those that have this key."""
    stamp = NO_KEY
    for i in range(first, last):
        k, s = keys[i], stamps[i]
        stamp = min(stamp, s if k == key else NO_KEY)
    lowest, place = NO_KEY, first
    for i in range(first, last):
        if keys[i] == key and stamps[i] == stamp and who[i] < lowest:
            lowest, place = who[i], i
    return place
