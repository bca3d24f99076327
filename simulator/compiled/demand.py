"""The demand of a step, and the arrays of its gate that policies may read."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.state import (
    BAD_CHOICE,
    fail,
    token_at,
)
from moereplay.simulator.compiled.weights import take_weights, to_units, weigh_run
from moereplay.simulator.jit.marks import called, fast, vectorized


@fast
def route(s, hooks):
    """Set the demand of the current step: as recorded, or as the routing policy chooses."""
    begin_demand(s)
    if s["has_choose"] == 1:
        if s["arrives"] == 0:
            count_recorded(s)
        choose(s, hooks.choose)
    if s["demand"]["changed"] == 0:
        if s["arrives"] == 1:
            take_union(s)
        else:
            recall(s)


@fast
def begin_demand(s):
    """Read the trace's arrays that policies may see, if any policy reads them."""
    s["demand"]["changed"] = 0
    if s["reads_ids"] == 1:
        read_gate(s)
    if s["batched"] == 1 and (s["scored"] == 1 or s["n_look"] > 0):
        gather(s)


@called
def mark_changed(s):
    """Note that tokens run other experts than recorded."""
    s["demand"]["changed"] = 1


@fast
def read_gate(s):
    """Read the arrays of the gate that are not part of the demand."""
    read_ids(s)
    if s["scored"] == 1:
        read_scores(s)
    if s["reads_weights"] == 1 and s["weighted"] == 1:
        read_weights(s)


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
def read_weights(s):
    """Copy the router's gate weights, in UNITs."""
    layer = s.now["layer"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            s.weights[t, j] = to_units(s.token_weights[token_at(s, t), layer, j])


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


@fast
def begin_recall(s):
    """Set the number of recorded experts; return the step's first position in the demand stream."""
    step, demand = s.now["step"], s["demand"]
    demand["demanded"] = s.offsets[step + 1] - s.offsets[step]
    demand["assignments"], demand["mass"] = 0, 0
    return s.offsets[step]


@fast
def recall_one(s, n, at):
    """Copy the n-th demanded expert from position `at` of the demand stream."""
    s.demand_expert[n] = s.now["layer"] * s["experts"] + s.stream_expert[at]
    s.demand_tokens[n], s.demand_sum[n] = s.stream_tokens[at], s.stream_sum[at]
    s["demand"]["assignments"] += s.stream_tokens[at]
    s["demand"]["mass"] += s.stream_sum[at]
    if s["knows_future"] == 1:
        s.demand_next[n] = s.stream_next[at]
        if s["reads_passes"] == 1:
            s.demand_pass[n] = s.stream_pass[at]
    if s["reads_demand"] == 1:
        s.demand_rank[n], s.demand_mass[n] = s.stream_rank[at], s.stream_mass[at]


@called
def recall(s):
    """Copy the recorded demand."""
    first = begin_recall(s)
    for n in range(s["demand"]["demanded"]):
        recall_one(s, n, first + n)


@called
def take_union(s):
    """Build the recorded demand of rows that are not known before the run."""
    take_weights(s)
    s["demand"]["demanded"] = union_of(
        s, 1 - s["weighted"], s.demand_expert, s.demand_rank, s.demand_mass, s.demand_sum, s.demand_tokens
    )


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
                mark_changed(s)
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
    s["demand"]["demanded"] = union_of(
        s, by_rank, s.demand_expert, s.demand_rank, s.demand_mass, s.demand_sum, s.demand_tokens
    )


@called
def run_instead(s, t, j, expert):
    """Replace the j-th expert of token t by another, or by none (NONE)."""
    s.ran[t, j] = expert
    mark_changed(s)


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
