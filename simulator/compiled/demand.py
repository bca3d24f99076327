"""The demand of a step, and what policies may see of its gate."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.errors import BAD_CHOICE, fail
from moereplay.simulator.compiled.rows import token_at
from moereplay.simulator.compiled.state import (
    batch_order,
    batch_score,
    batch_scores,
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
    look_order,
    look_score,
    now,
    offsets,
    ran,
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
    token_scores,
    token_weights,
    union_at,
    units,
    weights,
)
from moereplay.simulator.compiled.weights import to_units, weigh_run
from moereplay.simulator.jit.marks import called, fast


@fast
def route(s, hooks):
    """The demand of the step in progress: as recorded, or as the routing policy chooses."""
    begin_demand(s)
    if s["has_choose"] == 1:
        weigh_record(s)
        choose(s, hooks.choose)
    if s["demand"]["changed"] == 0:
        recall(s)


@fast
def begin_demand(s):
    """What policies may see of the trace is read, if anybody looks; nothing is changed yet."""
    s["demand"]["changed"] = 0
    if s["reads_ids"] == 1:
        read_gate(s)
    if s["batched"] == 1:
        gather(s)


@called
def mark_changed(s):
    """The tokens run something else than was recorded."""
    s["demand"]["changed"] = 1


@fast
def read_gate(s):
    """What policies may see of the trace, beside the demand."""
    read_ids(s)
    if s["scored"] == 1:
        read_scores(s)
    if s["reads_weights"] == 1 and s["weighted"] == 1:
        read_weights(s)


@called
def read_ids(s):
    """What the router chose: for policies, and to be changed."""
    layer = now(s)["layer"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            e = token_ids(s)[token_at(s, t), layer, j]
            ids(s)[t, j], ran(s)[t, j] = e, e


@called
def read_scores(s):
    """Policies calculate in float64, as Python does."""
    for t in range(s["compute"]["tokens"]):
        at, layer = token_at(s, t), now(s)["layer"]
        if s["reads_logits"] == 1:
            widen(token_logits(s)[at, layer], logits(s)[t])
        if s["reads_choice"] == 1:
            widen(token_choice(s)[at, layer], choice(s)[t])


@called
def widen(given, row):
    """One row of numbers."""
    for e in range(len(given)):
        row[e] = given[e]


@called
def read_weights(s):
    """What the router gave."""
    layer = now(s)["layer"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            weights(s)[t, j] = to_units(token_weights(s)[token_at(s, t), layer, j])


@called
def gather(s):
    """Tokens of the pass lie apart: what hooks would find in place is put together."""
    layer = now(s)["layer"]
    for t in range(s["compute"]["tokens"]):
        at = token_at(s, t)
        for e in range(s["experts"] if s["scored"] == 1 else 0):
            batch_scores(s)[t, e] = token_scores(s)[at, layer, e]
        for d in range(s["n_look"]):
            for e in range(s["experts"]):
                batch_order(s)[d, t, e] = look_order(s)[d, at, layer, e]
                batch_score(s)[d, t, e] = look_score(s)[d, at, layer, e]


# the recorded demand


@fast
def begin_recall(s):
    """How many experts were recorded; returns where the step begins in the recorded stream."""
    step, demand = now(s)["step"], s["demand"]
    demand["demanded"] = offsets(s)[step + 1] - offsets(s)[step]
    demand["assignments"], demand["mass"] = 0, 0
    return offsets(s)[step]


@fast
def recall_one(s, n, at):
    """The n-th demanded expert, which stands at `at` in the recorded stream."""
    demand_expert(s)[n] = now(s)["layer"] * s["experts"] + stream_expert(s)[at]
    demand_tokens(s)[n], demand_sum(s)[n] = stream_tokens(s)[at], stream_sum(s)[at]
    s["demand"]["assignments"] += stream_tokens(s)[at]
    s["demand"]["mass"] += stream_sum(s)[at]
    if s["knows_future"] == 1:
        demand_next(s)[n] = stream_next(s)[at]
        if s["reads_passes"] == 1:
            demand_pass(s)[n] = stream_pass(s)[at]
    if s["reads_demand"] == 1:
        demand_rank(s)[n], demand_mass(s)[n] = stream_rank(s)[at], stream_mass(s)[at]


@called
def recall(s):
    """The recorded demand."""
    first = begin_recall(s)
    for n in range(s["demand"]["demanded"]):
        recall_one(s, n, first + n)


# what routing chooses


@called
def weigh_record(s):
    """What the recorded demand amounts to, whatever is demanded in the end."""
    step, assignments, mass = now(s)["step"], 0, 0
    for at in range(offsets(s)[step], offsets(s)[step + 1]):
        assignments += stream_tokens(s)[at]
        mass += stream_sum(s)[at]
    s["demand"]["assignments"], s["demand"]["mass"] = assignments, mass


@called
def choose(s, hook):
    """The routing policy's choice, weighed from the unmodified logits."""
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            chosen(s)[t, j] = NONE
    hook(s)
    if not take_choice(s):
        s["demand"]["changed"] = 0
    elif s["demand"]["changed"] == 1:
        demand_anew(s)


@called
def take_choice(s):
    """Put the choice in place of the router's; False, and the run ends, if it names what does not exist."""
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            if not -1 <= chosen(s)[t, j] < s["experts"]:
                fail(s, BAD_CHOICE, chosen(s)[t, j])
                return False
            if chosen(s)[t, j] != ids(s)[t, j]:
                mark_changed(s)
            ids(s)[t, j], ran(s)[t, j] = chosen(s)[t, j], chosen(s)[t, j]
    return True


@called
def demand_anew(s):
    """What the tokens demand instead of what was recorded."""
    by_rank = weigh_run(s)
    if s["reads_weights"] == 1:
        for t in range(s["compute"]["tokens"]):
            for j in range(s["width"]):
                weights(s)[t, j] = units(s)[t, j]
    s["demand"]["demanded"] = union_of(
        s, by_rank, demand_expert(s), demand_rank(s), demand_mass(s), demand_sum(s), demand_tokens(s)
    )


@called
def run_instead(s, t, j, expert):
    """Token t runs another expert in place of its j-th, or none (NONE)."""
    ran(s)[t, j] = expert
    mark_changed(s)


# the union of what the tokens run


@called
def union_of(s, by_rank, expert, rank, mass, mass_sum, tokens):
    """The union of what the tokens run, with its weights, in demand order; returns how many experts.

    `union_at` is NONE throughout, before and after.
    """
    n, base = 0, now(s)["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            e, weight = ran(s)[t, j], units(s)[t, j]
            if e < 0:
                continue
            if union_at(s)[e] == NONE:
                union_at(s)[e] = n
                expert[n], rank[n], mass[n], mass_sum[n], tokens[n] = base + e, j, weight, 0, 0
                n += 1
            at = union_at(s)[e]
            rank[at], mass[at] = min(rank[at], j), max(mass[at], weight)
            mass_sum[at] += weight
            tokens[at] += 1
    for i in range(n):
        union_at(s)[expert[i] - base] = NONE
    sort(n, by_rank, expert, rank, mass, mass_sum, tokens)
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
