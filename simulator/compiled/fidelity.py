"""How far the executed mixture is from the router's own, where policies may have changed it."""

from __future__ import annotations

import numpy as np

from policies.contract import NONE
from simulator.compiled.counters import (
    ASSIGNMENTS_KEPT,
    MASS,
    MASS_DROPPED,
    MASS_KEPT,
    MASS_LOW_PRECISION,
    MASS_SUBSTITUTED,
    RANK_DISPLACEMENT,
    VARIATION,
    count,
)
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.state import (
    anew,
    own_in_run,
    ran,
    run_in_own,
    tier,
    token_choice,
    token_ids,
    token_weights,
    units,
)
from simulator.compiled.weights import any_reweighed, last_place, to_units, weigh


@called
def count_unchanged(w, layer):
    """Everything ran as the router chose."""
    count(w, ASSIGNMENTS_KEPT, layer, w["assignments"])
    count(w, MASS, layer, w["mass"])
    count(w, MASS_KEPT, layer, w["mass"])
    count_low(w, layer)


@called
def count_changed(w, layer):
    """Token by token; those that run an expert of another's choice are weighed anew."""
    if any_reweighed(w):
        weigh(w)
    count_tokens(w, layer)
    count_low(w, layer)


@called
def count_tokens(w, layer):
    """`units` holds the weights of tokens that are weighed anew."""
    for t in range(w["tokens"]):
        match(w, t, layer)
        count_kept(w, t, layer)
        if w["scored"] == 1:
            count_displacement(w, t, layer)
        if w["weighted"] == 1:
            count_token(w, t, layer)
            count_lost(w, t, layer)


@called
def match(w, t, layer):
    """Where each of the router's choices runs, and where the router had each that runs: places, or NONE."""
    own, run = token_ids(w)[w["start"] + t, layer], ran(w)[t]
    for j in range(w["width"]):
        own_in_run(w)[j], run_in_own(w)[j] = last_place(run, own[j]), last_place(own, run[j])


@called
def count_kept(w, t, layer):
    """How many of the router's choices run."""
    total = 0
    for j in range(w["width"]):
        total += 1 if own_in_run(w)[j] != NONE else 0
    count(w, ASSIGNMENTS_KEPT, layer, total)


@called
def count_displacement(w, t, layer):
    """Sum over executed slots of |rank by choice score - slot|; chosen experts keep their recorded rank."""
    total, at = 0, w["start"] + t
    for j in range(w["width"]):
        if run_in_own(w)[j] != NONE:
            total += abs(run_in_own(w)[j] - j)
        elif ran(w)[t, j] != NONE:
            total += abs(rank_behind(token_choice(w)[at, layer], token_ids(w)[at, layer], ran(w)[t, j]) - j)
    count(w, RANK_DISPLACEMENT, layer, total)


@called
def count_token(w, t, layer):
    """Mass of one token: the router's, the part kept, and half of all that moved."""
    weights, own = token_weights(w)[w["start"] + t, layer], token_ids(w)[w["start"] + t, layer]
    run, weighed = ran(w)[t], units(w)[t]
    whole, stayed, moved = 0, 0, 0
    for j in range(w["width"]):
        if own[j] != NONE:
            before, at = to_units(weights[j]), own_in_run(w)[j]
            whole += before
            stayed += before if at != NONE else 0
            moved += abs(before - after(weighed, at, before, anew(w)[t]))
    for j in range(w["width"]):
        if run[j] != NONE and run_in_own(w)[j] == NONE and last_place(run, run[j]) == j:
            moved += weighed[j]  # a foreign expert: its token is weighed anew
    count(w, MASS, layer, whole)
    count(w, MASS_KEPT, layer, stayed)
    count(w, VARIATION, layer, moved // 2)


@called
def count_lost(w, t, layer):
    """Mass of what did not run: each foreign expert stands in for one, those first whose own slot runs something."""
    weights, own, run = token_weights(w)[w["start"] + t, layer], token_ids(w)[w["start"] + t, layer], ran(w)[t]
    foreign, substituted, dropped = 0, 0, 0
    for j in range(w["width"]):
        if run[j] != NONE and run_in_own(w)[j] == NONE:
            foreign += 1
    for is_empty in range(2):
        for j in range(w["width"]):
            if own[j] != NONE and own_in_run(w)[j] == NONE and (run[j] == NONE) == (is_empty == 1):
                if foreign > 0:
                    substituted += to_units(weights[last_place(own, own[j])])
                else:
                    dropped += to_units(weights[last_place(own, own[j])])
                foreign -= 1
    count(w, MASS_SUBSTITUTED, layer, substituted)
    count(w, MASS_DROPPED, layer, dropped)


@called
def count_low(w, layer):
    """Mass of the router's own choice that ran below the highest precision."""
    if w["precisions"] == 1 or w["weighted"] == 0:
        return
    low = 0
    for t in range(w["tokens"]):
        at = w["start"] + t
        for j in range(w["width"]):
            e = token_ids(w)[at, layer, j]
            if e != NONE and tier(w)[e] > 0 and last_place(ran(w)[t], e) != NONE:
                low += to_units(token_weights(w)[at, layer, j])
    count(w, MASS_LOW_PRECISION, layer, low)


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
    for other in range(len(choice)):  # no branch: many at a time
        rank += 1 if (choice[other] > score) | ((choice[other] == score) & (other < e)) else 0
    for other in own:
        if other != NONE and (choice[other] > score or (choice[other] == score and other < e)):
            rank -= 1
    return rank
