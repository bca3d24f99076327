"""How far the executed mixture is from the router's own, where policies may have changed it."""

from __future__ import annotations

import numpy as np

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.counters import (
    ASSIGNMENTS,
    ASSIGNMENTS_KEPT,
    MASS,
    MASS_DROPPED,
    MASS_KEPT,
    MASS_LOW_PRECISION,
    MASS_SUBSTITUTED,
    RANK_DISPLACEMENT,
    VARIATION,
    count,
    count_for,
    count_here,
)
from moereplay.simulator.compiled.rows import token_at
from moereplay.simulator.compiled.state import (
    anew,
    now,
    own_in_run,
    ran,
    run_in_own,
    tier,
    token_choice,
    token_ids,
    token_weights,
    units,
)
from moereplay.simulator.compiled.weights import any_reweighed, last_place, to_units, weigh
from moereplay.simulator.jit.marks import called, fast


@fast
def count_assignments(s):
    """What the router chose, of the layer in progress."""
    if s["batched"] == 0:
        count_here(s, ASSIGNMENTS, s["demand"]["assignments"])
    else:
        for t in range(s["compute"]["tokens"]):
            count_for(s, t, ASSIGNMENTS, now(s)["layer"], assignments_of(s, t))


@called
def assignments_of(s, t):
    """How many experts the router chose for a token."""
    total = 0
    for j in range(s["width"]):
        total += 1 if token_ids(s)[token_at(s, t), now(s)["layer"], j] != NONE else 0
    return total


@called
def mass_of(s, t):
    """Their gate weight; a foreign trace may weigh what it did not route."""
    at, layer, total = token_at(s, t), now(s)["layer"], 0
    for j in range(s["width"] if s["weighted"] == 1 else 0):
        total += to_units(token_weights(s)[at, layer, j]) if token_ids(s)[at, layer, j] != NONE else 0
    return total


@called
def count_unchanged(s, layer):
    """Everything ran as the router chose."""
    if s["batched"] == 0:
        count(s, ASSIGNMENTS_KEPT, layer, s["demand"]["assignments"])
        count(s, MASS, layer, s["demand"]["mass"])
        count(s, MASS_KEPT, layer, s["demand"]["mass"])
    else:
        for t in range(s["compute"]["tokens"]):
            count_for(s, t, ASSIGNMENTS_KEPT, layer, assignments_of(s, t))
            count_for(s, t, MASS, layer, mass_of(s, t))
            count_for(s, t, MASS_KEPT, layer, mass_of(s, t))
    count_low(s, layer)


@called
def count_changed(s, layer):
    """Token by token; those that run an expert of another's choice are weighed anew."""
    if any_reweighed(s):
        weigh(s)
    count_tokens(s, layer)
    count_low(s, layer)


@called
def count_tokens(s, layer):
    """`units` holds the weights of tokens that are weighed anew."""
    for t in range(s["compute"]["tokens"]):
        match(s, t, layer)
        count_kept(s, t, layer)
        if s["scored"] == 1:
            count_displacement(s, t, layer)
        if s["weighted"] == 1:
            count_token(s, t, layer)
            count_lost(s, t, layer)


@called
def match(s, t, layer):
    """Where each of the router's choices runs, and where the router had each that runs: places, or NONE."""
    own, run = token_ids(s)[token_at(s, t), layer], ran(s)[t]
    for j in range(s["width"]):
        own_in_run(s)[j], run_in_own(s)[j] = last_place(run, own[j]), last_place(own, run[j])


@called
def count_kept(s, t, layer):
    """How many of the router's choices run."""
    total = 0
    for j in range(s["width"]):
        total += 1 if own_in_run(s)[j] != NONE else 0
    count_for(s, t, ASSIGNMENTS_KEPT, layer, total)


@called
def count_displacement(s, t, layer):
    """Sum over executed slots of |rank by choice score - slot|; chosen experts keep their recorded rank."""
    total, at = 0, token_at(s, t)
    for j in range(s["width"]):
        if run_in_own(s)[j] != NONE:
            total += abs(run_in_own(s)[j] - j)
        elif ran(s)[t, j] != NONE:
            total += abs(rank_behind(token_choice(s)[at, layer], token_ids(s)[at, layer], ran(s)[t, j]) - j)
    count_for(s, t, RANK_DISPLACEMENT, layer, total)


@called
def count_token(s, t, layer):
    """Mass of one token: the router's, the part kept, and half of all that moved."""
    weights, own = token_weights(s)[token_at(s, t), layer], token_ids(s)[token_at(s, t), layer]
    run, weighed = ran(s)[t], units(s)[t]
    whole, stayed, moved = 0, 0, 0
    for j in range(s["width"]):
        if own[j] != NONE:
            before, at = to_units(weights[j]), own_in_run(s)[j]
            whole += before
            stayed += before if at != NONE else 0
            moved += abs(before - after(weighed, at, before, anew(s)[t]))
    for j in range(s["width"]):
        if run[j] != NONE and run_in_own(s)[j] == NONE and last_place(run, run[j]) == j:
            moved += weighed[j]  # a foreign expert: its token is weighed anew
    count_for(s, t, MASS, layer, whole)
    count_for(s, t, MASS_KEPT, layer, stayed)
    count_for(s, t, VARIATION, layer, moved // 2)


@called
def count_lost(s, t, layer):
    """Mass of what did not run: each foreign expert stands in for one, those first whose own slot runs something."""
    weights, own, run = (
        token_weights(s)[token_at(s, t), layer],
        token_ids(s)[token_at(s, t), layer],
        ran(s)[t],
    )
    foreign, substituted, dropped = 0, 0, 0
    for j in range(s["width"]):
        if run[j] != NONE and run_in_own(s)[j] == NONE:
            foreign += 1
    for is_empty in range(2):
        for j in range(s["width"]):
            if own[j] != NONE and own_in_run(s)[j] == NONE and (run[j] == NONE) == (is_empty == 1):
                if foreign > 0:
                    substituted += to_units(weights[last_place(own, own[j])])
                else:
                    dropped += to_units(weights[last_place(own, own[j])])
                foreign -= 1
    count_for(s, t, MASS_SUBSTITUTED, layer, substituted)
    count_for(s, t, MASS_DROPPED, layer, dropped)


@called
def count_low(s, layer):
    """Mass of the router's own choice that ran below the highest precision."""
    if s["precisions"] == 1 or s["weighted"] == 0:
        return
    for t in range(s["compute"]["tokens"]):
        at, low = token_at(s, t), 0
        for j in range(s["width"]):
            e = token_ids(s)[at, layer, j]
            if e != NONE and tier(s)[e] > 0 and last_place(ran(s)[t], e) != NONE:
                low += to_units(token_weights(s)[at, layer, j])
        count_for(s, t, MASS_LOW_PRECISION, layer, low)


@fast
def after(weighed, at, before, is_anew):
    """What an expert of the router's choice weighs in the executed mixture."""
    if at == NONE:
        return 0
    return weighed[at] if is_anew == 1 else before


@called
def rank_behind(choice, own, e):
    """The rank of an expert that was not chosen: behind the chosen, by descending score, ties by lowest id."""
    rank, score = np.int64(len(own)), choice[e]
    for other in range(e):
        rank += 1 if choice[other] >= score else 0
    for other in range(e + 1, len(choice)):
        rank += 1 if choice[other] > score else 0
    for other in own:
        if other != NONE:
            rank -= 1 if (choice[other] > score) | ((choice[other] == score) & (other < e)) else 0
    return rank
