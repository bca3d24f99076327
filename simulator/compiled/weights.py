"""Gate weights of the executed experts, and their distance from the router's own mixture.

Weights equal those of `traces.routers` and `traces.demand` bit for bit: shares from the trace are combined with + * /
in float64 in the order of ranks (of ids, where the rule sums over experts), then rounded to float32 and to UNITs.
"""

from __future__ import annotations

import numpy as np

from moereplay.policies.contract import NONE, UNIT
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
    count_apart,
    count_for,
    count_here,
    count_row_kept,
)
from moereplay.simulator.compiled.state import (
    NO_LOGITS,
    all_eligible,
    fail,
    row_at,
    token_at,
)
from moereplay.simulator.jit.marks import called, fast, vectorized
from moereplay.traces.drafts import REJECTED

FAMILIES = ("softmax_topk", "topk_softmax", "sparsemixer", "softmax_groups", "sigmoid_groups")
SPARSEMIXER = FAMILIES.index("sparsemixer")


@fast
def to_units(weight):
    """Return round(weight * UNIT), half to even."""
    return np.int64(np.rint(np.float64(np.float32(weight)) * UNIT))


@called
def weigh_run(s):
    """Set the weights of executed experts: the router's own where a token keeps its experts, else from the logits.

    Return 1 if there are neither weights nor logits: weights are then 0, and the union is ordered by rank.
    """
    some = any_reweighed(s)
    if some:
        weigh(s)
    if s["weighted"] == 1 or not some:
        for t in range(s["compute"]["tokens"]):
            if s.reweighed[t] == 0:
                keep_weights(s, t)
    return 1 if s["weighted"] == 0 and not some else 0


@called
def keep_weights(s, t):
    """Copy the router's weights of those of its experts that a token runs."""
    at, layer = token_at(s, t), s.now["layer"]
    for j in range(s["width"]):
        s.units[t, j] = 0
        place = last_place(s.token_ids[at, layer], s.ran[t, j])
        if place != NONE and s["weighted"] == 1:
            s.units[t, j] = to_units(s.token_weights[at, layer, place])


@called
def take_weights(s):
    """Set the weights of all tokens to the router's own; 0 where the trace has none."""
    layer = s.now["layer"]
    for t in range(s["compute"]["tokens"]):
        at = token_at(s, t)
        for j in range(s["width"]):
            s.units[t, j] = to_units(s.token_weights[at, layer, j]) if s["weighted"] == 1 else 0


@called
def any_reweighed(s):
    """Mark tokens that need new weights; return whether there are any."""
    some = False
    for t in range(s["compute"]["tokens"]):
        s.reweighed[t] = 1 if is_reweighed(s, t) else 0
        some = some or s.reweighed[t] == 1
    return some


@called
def is_reweighed(s, t):
    """Return whether a token was routed to fewer experts than recorded, or runs one that is not its own.

    Otherwise each expert keeps its recorded weight, and one dropped at a miss leaves the other weights unchanged.
    """
    own, routed, run = s.token_ids[token_at(s, t), s.now["layer"]], s.ids[t], s.ran[t]
    fewer = 0
    for j in range(s["width"]):
        if run[j] != NONE and last_place(own, run[j]) == NONE:
            return True
        fewer += (1 if own[j] != NONE else 0) - (1 if routed[j] != NONE else 0)
    return fewer > 0


@called
def last_place(row, e):
    """Return the last position of an expert in a row, or NONE."""
    place = NONE
    for j in range(len(row)):  # without a branch, so that it vectorizes
        place = j if row[j] == e else place
    return place if e != NONE else NONE


@called
def weigh(s):
    """Compute weights in UNITs from the unmodified logits for the experts that tokens run; -1 weighs 0."""
    if s["scored"] == 0:
        fail(s, NO_LOGITS, 0)
        return
    layer = s.now["layer"]
    for t in range(s["compute"]["tokens"]):
        share = s.token_shares[token_at(s, t), layer]
        if s.rule["family"] == SPARSEMIXER:
            weigh_near(
                s.rule,
                share,
                s.token_logits[token_at(s, t), layer],
                s.ran[t],
                all_eligible(s),
                s.units[t],
            )
        else:
            weigh_shares(s.rule, share, s.ran[t], s.units[t])


@called
def weigh_shares(rule, share, ids, units):
    """Set each weight to the id's share, or to its part of the sum of shares if the rule normalises."""
    total = 0.0
    for j in range(len(ids)):
        if ids[j] >= 0:
            total += np.float64(share[ids[j]])
    for j in range(len(ids)):
        weight = 0.0
        if ids[j] >= 0 and rule["shared"] == 0:
            weight = np.float64(share[ids[j]])
        elif ids[j] >= 0 and total > 0.0:
            weight = np.float64(share[ids[j]]) / total
        units[j] = to_units(weight * rule["scale"])


@called
def weigh_near(rule, share, logits, ids, taken, units):
    """Set each weight to the id's share among the experts that are left and within the band below it."""
    taken[:] = 0
    for j in range(len(ids)):
        units[j] = 0
        if ids[j] >= 0:
            total = sum_near(rule, share, logits, ids[j], taken)
            own = np.float64(share[ids[j]]) if taken[ids[j]] == 0 else 0.0
            units[j] = to_units(own / total * rule["scale"]) if total > 0.0 else 0
            taken[ids[j]] = 1


@called
def sum_near(rule, share, logits, pick, taken):
    """Sum, in id order, the shares of the experts left that are within the band below `pick`."""
    reference, total = logits[pick], 0.0
    for e in range(len(logits)):
        size = max(abs(logits[e]), reference)
        gap = (reference - logits[e]) / size if size != 0 else np.float32(0)
        if taken[e] == 0 and gap <= rule["band"]:
            total += np.float64(share[e])
    return total


# distance of the executed mixture from the router's own


@fast
def count_assignments(s):
    """Count the router's assignments in the current layer."""
    if s["batched"] == 0:
        count_here(s, ASSIGNMENTS, s["demand"]["assignments"])
    elif s["n_sums"] > 0:
        count_sums(s, s.now["layer"], 0)
    else:
        for t in range(s["compute"]["tokens"]):
            count_for(s, t, ASSIGNMENTS, s.now["layer"], assignments_of(s, t))


@called
def assignments_of(s, t):
    """Return how many experts the router chose for a token."""
    total = 0
    for j in range(s["width"]):
        total += 1 if s.token_ids[token_at(s, t), s.now["layer"], j] != NONE else 0
    return total


@called
def mass_of(s, t):
    """Return the gate weight of the router's choices; a foreign trace may also weigh experts that were not chosen."""
    at, layer, total = token_at(s, t), s.now["layer"], 0
    for j in range(s["width"] if s["weighted"] == 1 else 0):
        total += to_units(s.token_weights[at, layer, j]) if s.token_ids[at, layer, j] != NONE else 0
    return total


@called
def count_unchanged(s, layer):
    """Count a layer that ran as routed."""
    if s["batched"] == 0:
        count(s, ASSIGNMENTS_KEPT, layer, s["demand"]["assignments"])
        count(s, MASS, layer, s["demand"]["mass"])
        count(s, MASS_KEPT, layer, s["demand"]["mass"])
    elif s["n_sums"] > 0:
        count_sums(s, layer, 1)
    else:
        for t in range(s["compute"]["tokens"]):
            count_for(s, t, ASSIGNMENTS_KEPT, layer, assignments_of(s, t))
            count_for(s, t, MASS, layer, mass_of(s, t))
            count_for(s, t, MASS_KEPT, layer, mass_of(s, t))
    count_low(s, layer)


@called
def count_sums(s, layer, kept):
    """Count the assignments of a pass's kept rows from sums by token, or (`kept`) that all of them ran as routed."""
    for row in range(row_at(s, 0), row_at(s, s["compute"]["tokens"])):
        if s.row_draft[row] != REJECTED:
            token = s.row_reads[row]
            if kept == 0:
                count_apart(s, row, ASSIGNMENTS, layer, s.token_assigned[token, layer])
            else:
                count_row_kept(s, row, layer, s.token_assigned[token, layer], s.token_mass[token, layer])


@called
def count_changed(s, layer):
    """Count a layer whose routing changed, token by token, with new weights where experts were replaced."""
    if any_reweighed(s):
        weigh(s)
    count_tokens(s, layer)
    count_low(s, layer)


@called
def count_tokens(s, layer):
    """Count all tokens; `units` must hold the new weights."""
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
    """Find each routed expert's position in the run, and each executed expert's position in the routing, or NONE."""
    own, run = s.token_ids[token_at(s, t), layer], s.ran[t]
    for j in range(s["width"]):
        s.own_in_run[j], s.run_in_own[j] = last_place(run, own[j]), last_place(own, run[j])


@called
def count_kept(s, t, layer):
    """Count the routed experts that run."""
    total = 0
    for j in range(s["width"]):
        total += 1 if s.own_in_run[j] != NONE else 0
    count_for(s, t, ASSIGNMENTS_KEPT, layer, total)


@called
def count_displacement(s, t, layer):
    """Sum over executed slots |rank by choice score - slot|; routed experts keep their recorded rank."""
    total, at = 0, token_at(s, t)
    for j in range(s["width"]):
        if s.run_in_own[j] != NONE:
            total += abs(s.run_in_own[j] - j)
        elif s.ran[t, j] != NONE:
            total += abs(rank_behind(s.token_choice[at, layer], s.token_ids[at, layer], s.ran[t, j]) - j)
    count_for(s, t, RANK_DISPLACEMENT, layer, total)


@called
def count_token(s, t, layer):
    """Count the gate weight of one token: the router's, the part kept, and the total variation."""
    weights, own = s.token_weights[token_at(s, t), layer], s.token_ids[token_at(s, t), layer]
    run, weighed = s.ran[t], s.units[t]
    whole, stayed, moved = 0, 0, 0
    for j in range(s["width"]):
        if own[j] != NONE:
            before, at = to_units(weights[j]), s.own_in_run[j]
            whole += before
            stayed += before if at != NONE else 0
            moved += abs(before - after(weighed, at, before, s.reweighed[t]))
    for j in range(s["width"]):
        if run[j] != NONE and s.run_in_own[j] == NONE and last_place(run, run[j]) == j:
            moved += weighed[j]  # a foreign expert, so its token has new weights
    count_for(s, t, MASS, layer, whole)
    count_for(s, t, MASS_KEPT, layer, stayed)
    count_for(s, t, VARIATION, layer, moved // 2)


@called
def count_lost(s, t, layer):
    """Count the weight of experts that did not run as substituted or dropped.

    Each foreign expert substitutes for one routed expert; those whose own slot runs something come first.
    """
    weights, own, run = (
        s.token_weights[token_at(s, t), layer],
        s.token_ids[token_at(s, t), layer],
        s.ran[t],
    )
    foreign, substituted, dropped = 0, 0, 0
    for j in range(s["width"]):
        if run[j] != NONE and s.run_in_own[j] == NONE:
            foreign += 1
    for is_empty in range(2):
        for j in range(s["width"]):
            if own[j] != NONE and s.own_in_run[j] == NONE and (run[j] == NONE) == (is_empty == 1):
                if foreign > 0:
                    substituted += to_units(weights[last_place(own, own[j])])
                else:
                    dropped += to_units(weights[last_place(own, own[j])])
                foreign -= 1
    count_for(s, t, MASS_SUBSTITUTED, layer, substituted)
    count_for(s, t, MASS_DROPPED, layer, dropped)


@called
def count_low(s, layer):
    """Count the weight of routed experts that ran below the highest precision."""
    if s["precisions"] == 1 or s["weighted"] == 0:
        return
    for t in range(s["compute"]["tokens"]):
        at, low = token_at(s, t), 0
        for j in range(s["width"]):
            e = s.token_ids[at, layer, j]
            if e != NONE and s.tier[e] > 0 and last_place(s.ran[t], e) != NONE:
                low += to_units(s.token_weights[at, layer, j])
        count_for(s, t, MASS_LOW_PRECISION, layer, low)


@fast
def after(weighed, at, before, is_anew):
    """Return the weight of a routed expert in the executed mixture."""
    if at == NONE:
        return 0
    return weighed[at] if is_anew == 1 else before


@vectorized
def rank_behind(choice, own, e):
    """Return the rank of an expert that was not chosen: after the chosen, by descending score, ties by lowest id."""
    rank, score = np.int64(len(own)), choice[e]
    for other in range(len(choice)):
        rank += 1 if (choice[other] > score) | ((choice[other] == score) & (other < e)) else 0
    for other in own:
        if other != NONE:
            rank -= 1 if (choice[other] > score) | ((choice[other] == score) & (other < e)) else 0
    return rank
