"""The demand of a step, and what policies may see of its gate."""

from __future__ import annotations

from policies.contract import NONE
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.state import (
    BAD_CHOICE,
    choice,
    chosen,
    demand_expert,
    demand_mass,
    demand_next,
    demand_pass,
    demand_rank,
    demand_sum,
    demand_tokens,
    ids,
    logits,
    now,
    offsets,
    ran,
    slot,
    stream_expert,
    stream_mass,
    stream_next,
    stream_pass,
    stream_rank,
    stream_sum,
    stream_tokens,
    token_choice,
    token_ids,
    token_logits,
    token_weights,
    units,
    weights,
)
from simulator.compiled.weights import to_units, weigh_run


@fast
def route(w, hooks):
    """The demand of the step in progress: as recorded, or as the routing policy chooses."""
    read_gate(w)
    weigh_record(w)
    if w["has_choose"] == 1:
        choose(w, hooks.choose)
    if w["changed"] == 0:
        recall(w)


@fast
def read_gate(w):
    """What policies may see of the trace, beside the demand."""
    read_ids(w)
    if w["scored"] == 1:
        read_scores(w)
    if w["reads_weights"] == 1 and w["weighted"] == 1:
        read_weights(w)


@called
def read_ids(w):
    """What the router chose: for policies, and to be changed."""
    layer = now(w)["layer"]
    for t in range(w["tokens"]):
        for j in range(w["width"]):
            e = token_ids(w)[w["start"] + t, layer, j]
            ids(w)[t, j], ran(w)[t, j] = e, e


@called
def read_scores(w):
    """Policies calculate in float64, as Python does."""
    for t in range(w["tokens"]):
        at, layer = w["start"] + t, now(w)["layer"]
        if w["reads_logits"] == 1:
            widen(token_logits(w)[at, layer], logits(w)[t])
        if w["reads_choice"] == 1:
            widen(token_choice(w)[at, layer], choice(w)[t])


@called
def widen(given, row):
    """One row of numbers."""
    for e in range(len(given)):
        row[e] = given[e]


@called
def read_weights(w):
    """What the router gave."""
    layer = now(w)["layer"]
    for t in range(w["tokens"]):
        for j in range(w["width"]):
            weights(w)[t, j] = to_units(token_weights(w)[w["start"] + t, layer, j])


@called
def weigh_record(w):
    """What the recorded demand amounts to, whatever is demanded in the end."""
    step, assignments, mass = w["index"] * w["layers"] + now(w)["layer"], 0, 0
    for at in range(offsets(w)[step], offsets(w)[step + 1]):
        assignments += stream_tokens(w)[at]
        mass += stream_sum(w)[at]
    w["assignments"], w["mass"] = assignments, mass


@called
def recall(w):
    """The recorded demand."""
    step = w["index"] * w["layers"] + now(w)["layer"]
    first, base = offsets(w)[step], now(w)["layer"] * w["experts"]
    w["demanded"] = offsets(w)[step + 1] - first
    for i in range(w["demanded"]):
        at = first + i
        demand_expert(w)[i], demand_rank(w)[i] = base + stream_expert(w)[at], stream_rank(w)[at]
        demand_mass(w)[i], demand_sum(w)[i] = stream_mass(w)[at], stream_sum(w)[at]
        demand_tokens(w)[i], demand_next(w)[i] = stream_tokens(w)[at], stream_next(w)[at]
        if w["reads_passes"] == 1:
            demand_pass(w)[i] = stream_pass(w)[at]


@called
def choose(w, hook):
    """The routing policy's choice, weighed from the unmodified logits."""
    tokens = w["tokens"]
    for t in range(tokens):
        for j in range(w["width"]):
            chosen(w)[t, j] = NONE
    hook(w)
    for t in range(tokens):
        for j in range(w["width"]):
            if not -1 <= chosen(w)[t, j] < w["experts"]:
                w["error"], w["culprit"], w["changed"] = BAD_CHOICE, chosen(w)[t, j], 0
                return
            if chosen(w)[t, j] != ids(w)[t, j]:
                w["changed"] = 1
            ids(w)[t, j], ran(w)[t, j] = chosen(w)[t, j], chosen(w)[t, j]
    if w["changed"] == 1:
        demand_anew(w)


@called
def demand_anew(w):
    """What the tokens demand instead of what was recorded."""
    weigh_run(w)
    if w["reads_weights"] == 1:
        for t in range(w["tokens"]):
            for j in range(w["width"]):
                weights(w)[t, j] = units(w)[t, j]
    w["demanded"] = unite(w, demand_expert(w), demand_rank(w), demand_mass(w), demand_sum(w), demand_tokens(w))


# the union of what the tokens run


@called
def unite(w, expert, rank, mass, mass_sum, tokens):
    """Unite what the tokens run, with its weights, in demand order; returns how many experts.

    `slot` is NONE throughout, before and after.
    """
    n, base = 0, now(w)["layer"] * w["experts"]
    for t in range(w["tokens"]):
        for j in range(w["width"]):
            e, weight = ran(w)[t, j], units(w)[t, j]
            if e < 0:
                continue
            if slot(w)[e] == NONE:
                slot(w)[e] = n
                expert[n], rank[n], mass[n], mass_sum[n], tokens[n] = base + e, j, weight, 0, 0
                n += 1
            at = slot(w)[e]
            rank[at], mass[at] = min(rank[at], j), max(mass[at], weight)
            mass_sum[at] += weight
            tokens[at] += 1
    for i in range(n):
        slot(w)[expert[i] - base] = NONE
    sort(n, w["by_rank"], expert, rank, mass, mass_sum, tokens)
    return n


@called
def sort(n, by_rank, expert, rank, mass, mass_sum, tokens):
    """By descending largest weight, or else by best rank and descending number of tokens; ties by lowest id."""
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
    """Whether an entry comes before the one before it."""
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
    """Exchange an entry with the one before it."""
    column[j], column[j - 1] = column[j - 1], column[j]
