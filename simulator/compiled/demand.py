"""The demand of a step, and the arrays of its gate that policies may read."""

from __future__ import annotations

import numpy as np

from moereplay.policies.contract import NONE, RESIDENT, UNIT
from moereplay.simulator.compiled import counters
from moereplay.simulator.compiled.cache import find_any
from moereplay.simulator.compiled.counters import (
    ASSIGNMENTS,
    ASSIGNMENTS_KEPT,
    MASS,
    MASS_BELOW_SECOND,
    MASS_BELOW_THIRD,
    MASS_DROPPED,
    MASS_KEPT,
    MASS_LOW_PRECISION,
    MASS_SUBSTITUTED,
    RANK_DISPLACEMENT,
    SUBSTITUTED,
    VARIATION,
    count,
    count_apart,
    count_for,
    count_here,
    count_row_kept,
)
from moereplay.simulator.compiled.state import (
    BAD_CHOICE,
    BAD_STAND_IN,
    DROPPED,
    HIT,
    NO_HOOK,
    NO_LOGITS,
    REPLACED,
    all_eligible,
    fail,
    row_at,
    runs,
    token_at,
)
from moereplay.simulator.jit.marks import called, fast, vectorized
from moereplay.traces.drafts import REJECTED

# Gate weights of the executed experts, and their distance from the router's own mixture.
#
# Weights equal those of `traces.routers` and `traces.demand` bit for bit: shares from the trace are combined with + *
# / in float64 in the order of ranks (of ids, where the rule sums over experts), then rounded to float32 and to UNITs.

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
            weigh_near(s.rule, share, s.token_logits[token_at(s, t), layer], s.ran[t], all_eligible(s), s.units[t])
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
        if s["scored"] == 1:
            count_displacement(s, t, layer)
        if s["weighted"] == 1:
            count_token(s, t, layer)
            count_lost(s, t, layer)


@called
def match(s, t, layer):
    """Find routed experts in the run, and executed experts in the routing, or NONE; count the routed ones that run."""
    own, run, total = s.token_ids[token_at(s, t), layer], s.ran[t], 0
    for j in range(s["width"]):
        s.own_in_run[j], s.run_in_own[j] = last_place(run, own[j]), last_place(own, run[j])
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
    weights, own = s.token_weights[token_at(s, t), layer], s.token_ids[token_at(s, t), layer]
    run, foreign, substituted, dropped = s.ran[t], 0, 0, 0
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
    """Count the weight of routed experts that ran below the highest precision, the second and the third."""
    if s["precisions"] == 1 or s["weighted"] == 0:
        return
    for t in range(s["compute"]["tokens"]):
        at, low, lower, lowest = token_at(s, t), 0, 0, 0
        for j in range(s["width"]):
            e = s.token_ids[at, layer, j]
            if e != NONE and s.tier[e] > 0 and last_place(s.ran[t], e) != NONE:
                weight = to_units(s.token_weights[at, layer, j])
                low += weight
                lower += weight if s.tier[e] > 1 else 0
                lowest += weight if s.tier[e] > 2 else 0
        count_for(s, t, MASS_LOW_PRECISION, layer, low)
        count_for(s, t, MASS_BELOW_SECOND, layer, lower)
        count_for(s, t, MASS_BELOW_THIRD, layer, lowest)


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


@fast
def route(s, hooks):
    """Set the demand of the current step: as recorded, or as the routing policy chooses."""
    begin_demand(s)
    if s["has_choose"] == 1:
        if s["arrives"] == 0:
            count_recorded(s)
        choose(s, hooks.choose)
    if s["demand"]["changed"] == 0:
        if s["arrives"] == 1:  # rows that are not known before the run
            take_weights(s)
            union(s, 1 - s["weighted"])
        else:
            recall(s)


@fast
def begin_demand(s):
    """Read the trace's arrays that policies may see, if any policy reads them."""
    s["demand"]["changed"] = 0
    if s["reads_ids"] == 1:
        read_ids(s)
        if s["scored"] == 1:
            read_scores(s)
        if s["reads_weights"] == 1 and s["weighted"] == 1:
            for t in range(s["compute"]["tokens"]):
                for j in range(s["width"]):
                    s.weights[t, j] = to_units(s.token_weights[token_at(s, t), s.now["layer"], j])
    if s["batched"] == 1 and (s["scored"] == 1 or s["n_look"] > 0):
        gather(s)


@called
def read_ids(s):
    """Copy the router's choice, for policies and for changes to it."""
    layer = s.now["layer"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            e = s.token_ids[token_at(s, t), layer, j]
            s.ids[t, j], s.ran[t, j] = e, e


@called
def read_scores(s):
    """Copy scores as float64: compiled and plain Python policies must calculate alike."""
    for t in range(s["compute"]["tokens"]):
        at, layer = token_at(s, t), s.now["layer"]
        if s["reads_logits"] == 1:
            widen(s.token_logits[at, layer], s.logits[t])
        if s["reads_choice"] == 1:
            widen(s.token_choice[at, layer], s.choice[t])


@vectorized
def widen(given, row):
    """Copy a row into one of another type."""
    for e in range(len(given)):
        row[e] = given[e]


@called
def gather(s):
    """Copy scattered tokens of the pass into adjacent rows, where hooks expect them."""
    layer = s.now["layer"]
    for t in range(s["compute"]["tokens"]):
        at = token_at(s, t)
        for e in range(s["experts"] if s["scored"] == 1 else 0):
            s.batch_scores[t, e] = s.token_scores[at, layer, e]
        for d in range(s["n_look"]):
            for e in range(s["experts"]):
                s.batch_order[d, t, e] = s.look_order[d, at, layer, e]
                s.batch_score[d, t, e] = s.look_score[d, at, layer, e]


# the recorded demand


@called
def recall(s):
    """Copy the recorded demand; return the step's first position in the demand stream."""
    first, base = s.offsets[s.now["step"]], s.now["layer"] * s["experts"]
    demanded, assignments, mass = s.offsets[s.now["step"] + 1] - first, 0, 0
    s["demand"]["demanded"] = demanded
    for n in range(demanded):
        tokens, weight = s.stream_tokens[first + n], s.stream_sum[first + n]
        s.demand_expert[n], s.demand_tokens[n], s.demand_sum[n] = base + s.stream_expert[first + n], tokens, weight
        assignments += tokens
        mass += weight
    s["demand"]["assignments"], s["demand"]["mass"] = assignments, mass
    for n in range(demanded if s["knows_future"] == 1 else 0):
        s.demand_next[n] = s.stream_next[first + n]
    for n in range(demanded if s["reads_passes"] == 1 and s["knows_future"] == 1 else 0):
        s.demand_pass[n] = s.stream_pass[first + n]
    for n in range(demanded if s["reads_demand"] == 1 else 0):
        s.demand_rank[n], s.demand_mass[n] = s.stream_rank[first + n], s.stream_mass[first + n]
    return first


# the demand of a routing policy


@called
def count_recorded(s):
    """Count assignments and gate weight of the recorded demand, before routing changes it."""
    step, assignments, mass = s.now["step"], 0, 0
    for at in range(s.offsets[step], s.offsets[step + 1]):
        assignments += s.stream_tokens[at]
        mass += s.stream_sum[at]
    s["demand"]["assignments"], s["demand"]["mass"] = assignments, mass


@called
def choose(s, hook):
    """Call the routing policy and build its demand, with gate weights from the unmodified logits."""
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            s.chosen[t, j] = NONE
    hook(s)
    if not take_choice(s):
        s["demand"]["changed"] = 0
    elif s["demand"]["changed"] == 1:
        rebuild_demand(s)


@called
def take_choice(s):
    """Replace the router's choice; return False, and end the run, if the policy chose an invalid expert."""
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            if not -1 <= s.chosen[t, j] < s["experts"]:
                fail(s, BAD_CHOICE, s.chosen[t, j])
                return False
            if s.chosen[t, j] != s.ids[t, j]:
                s["demand"]["changed"] = 1
            s.ids[t, j], s.ran[t, j] = s.chosen[t, j], s.chosen[t, j]
    return True


@called
def rebuild_demand(s):
    """Build the demand from the experts that the tokens run, in place of the recorded demand."""
    by_rank = weigh_run(s)
    if s["reads_weights"] == 1:
        for t in range(s["compute"]["tokens"]):
            for j in range(s["width"]):
                s.weights[t, j] = s.units[t, j]
    union(s, by_rank)


@called
def union(s, by_rank):
    """Build the demand as the union of the experts that the tokens run."""
    s["demand"]["demanded"] = union_of(
        s, by_rank, s.demand_expert, s.demand_rank, s.demand_mass, s.demand_sum, s.demand_tokens
    )


@called
def run_instead(s, t, j, expert):
    """Replace the j-th expert of token t by another, or by none (NONE)."""
    s.ran[t, j] = expert
    s["demand"]["changed"] = 1


# the union of the demand


@called
def union_of(s, by_rank, expert, rank, mass, mass_sum, tokens):
    """Fill in the union of the tokens' experts, with gate weights, in demand order; return its length.

    `union_at` is NONE throughout, before and after.
    """
    n, base = 0, s.now["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            e, weight = s.ran[t, j], s.units[t, j]
            if e < 0:
                continue
            if s.union_at[e] == NONE:
                s.union_at[e] = n
                expert[n], rank[n], mass[n], mass_sum[n], tokens[n] = base + e, j, weight, 0, 0
                n += 1
            at = s.union_at[e]
            rank[at], mass[at] = min(rank[at], j), max(mass[at], weight)
            mass_sum[at] += weight
            tokens[at] += 1
    for i in range(n):
        s.union_at[expert[i] - base] = NONE
    sort(n, by_rank, expert, rank, mass, mass_sum, tokens)
    return n


@called
def sort(n, by_rank, expert, rank, mass, mass_sum, tokens):
    """Sort by descending largest gate weight, or by best rank and descending number of tokens; ties by lowest id."""
    for i in range(1, n):
        j = i
        while j > 0 and comes_first(j, by_rank, expert, rank, mass, tokens):
            swap(expert, j)
            swap(rank, j)
            swap(mass, j)
            swap(mass_sum, j)
            swap(tokens, j)
            j -= 1


@fast
def comes_first(j, by_rank, expert, rank, mass, tokens):
    """Return whether entry j sorts before entry j - 1."""
    if by_rank == 1:
        if rank[j] != rank[j - 1]:
            return rank[j] < rank[j - 1]
        if tokens[j] != tokens[j - 1]:
            return tokens[j] > tokens[j - 1]
    elif mass[j] != mass[j - 1]:
        return mass[j] > mass[j - 1]
    return expert[j] < expert[j - 1]


@fast
def swap(column, j):
    """Exchange entries j and j - 1."""
    column[j], column[j - 1] = column[j - 1], column[j]


# Misses that are not fetched for every token: experts are dropped, or resident experts substitute for them.


@fast
def clear_substitutes(s):
    """Clear the mark that this step has substitutes."""
    s["substitution"]["substituted"] = 0


@called
def drop(s, access):
    """Remove the expert from all tokens that run it."""
    access["served"] = DROPPED
    e = access["x"] - s.now["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            if s.ran[t, j] == e:
                run_instead(s, t, j, NONE)
    s["demand"]["changed"] = 1
    count(s, counters.DROPPED, s.now["layer"], 1)


@called
def substitute(s, hook, access):
    """Call the policy for every token. Fetch the expert at full precision if any token still needs it."""
    if s["has_substitute"] == 0:
        fail(s, NO_HOOK, 0)
        return
    for e in range(s["experts"]):
        s.stand_ins[e] = 0
    needed, e = 0, access["x"] - s.now["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        j = first_place(s.ran[t], e)
        if j == NONE:
            continue
        other = substitute_for(s, hook, t, j)
        if other == NONE:
            needed += 1
            continue
        if not (0 <= other < s["experts"] and s.eligible[other] == 1 and first_place(s.ran[t], other) == NONE):
            fail(s, BAD_STAND_IN, other)
            return
        run_instead(s, t, j, other)
        s.stand_ins[other] += 1
        s["substitution"]["substituted"] = 1
        count_for(s, t, SUBSTITUTED, s.now["layer"], 1)
    access["tokens"], access["y"] = needed, access["x"] * s["precisions"]
    if needed == 0:
        access["served"] = REPLACED


@fast
def mark_if_resident(s, e):
    """Mark expert e of the layer as eligible if a copy is resident."""
    s.eligible[e] = 1 if find_any(s, s.now["layer"] * s["experts"] + e, RESIDENT) != NONE else 0


@called
def substitute_for(s, hook, t, j):
    """Return the expert that substitutes for a token's j-th one, or NONE: a resident one that it does not run."""
    for i in range(s["width"]):
        if s.ran[t, i] != NONE:
            s.eligible[s.ran[t, i]] = 0
    other = hook(s, t, j)
    for i in range(s["width"]):
        if s.ran[t, i] != NONE:
            mark_if_resident(s, s.ran[t, i])
    return other


@called
def first_place(row, e):
    """Return the first position of e in a row, or NONE."""
    for j in range(len(row)):
        if row[j] == e:
            return j
    return NONE


# the demand after substitution


@called
def rebuild_union(s, served):
    """Rebuild the union of the demand in `others` (contract `atomic`); substitutes are used but are not accesses.

    `served` is the number of accesses before; return the number after.
    """
    by_rank = weigh_run(s)
    union = union_of(s, by_rank, s.final_expert, s.final_rank, s.final_mass, s.final_sum, s.final_tokens)
    base, total = s.now["layer"] * s["experts"], union
    for i in range(served):
        s.access_of[s.accesses[i]["x"] - base] = i
    for i in range(union):
        serve(s, i, s.final_expert[i], s.final_tokens[i])
    for i in range(served):
        s.access_of[s.accesses[i]["x"] - base] = NONE
        if not runs(s.accesses[i]["served"]):
            s.others[total] = s.accesses[i]
            total += 1
    return total


@called
def serve(s, i, x, tokens):
    """Serve the i-th expert of the new union: as before, or as a hit if it is a substitute."""
    known = s.access_of[x - s.now["layer"] * s["experts"]]
    if known == NONE:
        stand_in(s, s.others[i], x, tokens)
    else:
        s.others[i] = s.accesses[known]
        s.others[i]["tokens"] = tokens


@called
def stand_in(s, access, x, tokens):
    """Make an access of a substitute: it is used, but not counted as an access."""
    access["n"], access["x"], access["y"], access["tokens"] = NONE, x, find_any(s, x, RESIDENT), tokens
    access["served"] = HIT


@called
def add_stand_ins(s, served):
    """Append the substitutes of the current access, lowest id first (contract `sequential`); return the new length."""
    base, total = s.now["layer"] * s["experts"], served
    for e in range(s["experts"]):
        if s.stand_ins[e] > 0:
            stand_in(s, s.accesses[total], base + e, s.stand_ins[e])
            total += 1
    clear_substitutes(s)
    return total
