"""Cache-Prior (arXiv 2412.00099, eq. 9-10): lift the scores of resident experts before the top-k.

z' = z + lam * delta * [resident, or among the token's own top_j]. Chosen by z'; weights and ranks stay those of z.
Resident is what the papers call cached: an expert in flight, demanded or prefetched, is not lifted before it arrives.
(The authors read missing experts blockingly and prefetch nothing, so at their gates none is in flight.) The own top_j
are those of largest gate weight (as in the authors' code: a correction bias may order scores otherwise), or of best
rank where weights are not recorded; -1 stands for their values, 2, or 1 for models of two experts per token. `delta` is
the running mean over tokens of max(z) - min(z) per layer, the current token included (the authors' code); other
readings are named options. A reset clears it. CECAR's `ema_range` was made for decode passes alone.
"""

from moereplay.policies.contract import RESIDENT, Choice, Memory, Number, Routing, always, slot
from moereplay.policies.selection import protected, routed, write_by_rank

PARAMS = (
    Number("lam", 0.2, 0, 10),
    Number("top_j", -1, -1, 64, integer=True),
    Choice("delta", "running_range", ("running_range", "token_range", "ema_range", "running_mean")),
)
LAM, TOP_J, DELTA = slot(PARAMS, "lam"), slot(PARAMS, "top_j"), slot(PARAMS, "delta")
RUNNING_RANGE, TOKEN_RANGE, EMA_RANGE, RUNNING_MEAN = 0, 1, 2, 3
SUM, COUNT = 0, 1
EMA = 0.99
CANDIDATE, RECORDED = 0, 1  #: of the memory's first E rows: a list, and per expert whether the router chose it
MINUS_INFINITY = -float("inf")


def choose(now, step, experts, copies, own, out):
    """Choose for each token, against one snapshot of residency; the running statistics advance token by token."""
    top_j = protected(now, own.par[TOP_J])
    for t in range(now["tokens"]):
        ids, scores, row, wanted = step.ids[t], step.choice[t], out[t], routed(step.ids[t])
        if wanted == 0:
            continue
        lift = own.par[LAM] * spread(now, own, scores)
        if lift == 0.0:  # the recorded choice, also where rounding has the model's own order differ from its logits'
            for j in range(wanted):
                row[j] = ids[j]
            continue
        weights = step.weight[t] if len(step.weight) > 0 else ids[:0]
        contend(now, copies, own, ids, scores, weights, top_j, lift, row)
        write_by_rank(row, wanted, ids, scores)


def contend(now, copies, own, ids, scores, weights, top_j, lift, row):
    """Select the best by lifted score; ties to recorded experts first, then to the lowest id.

    The row holds them in the order in which they were considered. A lifted expert e is written as E + e, as long
    as scores are compared.
    """
    mark, count = now["experts"], 0
    for j in range(len(ids)):
        if ids[j] >= 0:
            is_lifted = (weight_rank(weights, j) < top_j) | is_resident(now, copies, ids[j])
            row[count] = ids[j] + (mark if is_lifted else 0)
            count += 1
    set_recorded(own.rows, ids, 1)
    last = last_of_worst(row, count, scores, mark, lift)
    worst = value(scores, mark, lift, row[last])
    for i in range(list_candidates(now, copies, own.rows, scores, lift, worst)):
        name = own.rows[i][CANDIDATE]
        if value(scores, mark, lift, name) > worst:
            replace(row, last, count, name)
            last = last_of_worst(row, count, scores, mark, lift)
            worst = value(scores, mark, lift, row[last])
    set_recorded(own.rows, ids, 0)
    for j in range(count):
        row[j] -= mark if row[j] >= mark else 0


def list_candidates(now, copies, rows, scores, lift, worst):
    """List the names of experts that the router did not choose and that exceed the worst; return their number.

    No branches, because they would be unpredictable: first the experts that would exceed it if they were resident,
    then those of them that do.
    """
    near, count, most, mark = 0, 0, max(lift, 0.0), now["experts"]
    for e in range(len(scores)):
        rows[near][CANDIDATE] = e
        near += 1 if scores[e] + most > worst else 0
    for i in range(near):
        e = rows[i][CANDIDATE]
        resident = is_resident(now, copies, e)
        rows[count][CANDIDATE] = e + (mark if resident else 0)
        exceeds = scores[e] + (lift if resident else 0.0) > worst
        count += 1 if exceeds & (rows[e][RECORDED] == 0) else 0
    return count


def set_recorded(rows, ids, recorded):
    """Mark a token's experts as chosen by its router (1), or unmark them (0)."""
    for e in ids:
        if e >= 0:
            rows[e][RECORDED] = recorded


def value(scores, mark, lift, name):
    """Return the score of an entry of the row, with the lift if it has one."""
    return scores[name - (mark if name >= mark else 0)] + (lift if name >= mark else 0.0)


def last_of_worst(row, count, scores, mark, lift):
    """Return the position of the smallest score in a row, the last of equals."""
    last, worst = 0, value(scores, mark, lift, row[0])
    for place in range(1, count):
        own = value(scores, mark, lift, row[place])
        last, worst = (place, own) if own <= worst else (last, worst)
    return last


def replace(row, place, count, name):
    """Take an entry out of a row, and append another."""
    for after in range(place + 1, count):
        row[after - 1] = row[after]
    row[count - 1] = name


def weight_rank(weights, j):
    """Count a token's experts with more gate weight than its j-th, ties to the better rank; j without weights."""
    if len(weights) == 0:
        return j
    before = 0
    for i in range(len(weights)):
        before += 1 if (weights[i] > weights[j]) | ((weights[i] == weights[j]) & (i < j)) else 0
    return before


def is_resident(now, copies, e):
    """Return whether any copy of the layer's expert e is resident."""
    first = (now["layer"] * now["experts"] + e) * now["precisions"]
    found = 0
    for y in range(first, first + now["precisions"]):
        found += 1 if copies[y]["state"] == RESIDENT else 0
    return found > 0


def spread(now, own, scores):
    """Return the scale of the lift, by the reading of `delta`; masked experts (-inf) are excluded."""
    state, reading = own.reals[now["layer"]], own.par[DELTA]
    extent = mean(scores) if reading == RUNNING_MEAN else width(scores)
    if reading == TOKEN_RANGE:
        return extent
    if reading == EMA_RANGE:
        state[SUM] = EMA * state[SUM] + (1.0 - EMA) * extent if state[COUNT] > 0 else extent
        state[COUNT] += 1.0
        return state[SUM]
    state[SUM] += extent
    state[COUNT] += 1.0
    return state[SUM] / state[COUNT]


def width(scores):
    """Return the largest minus the smallest finite score, in two halves, as each comparison waits for the last."""
    half = len(scores) // 2
    low, high, low_too, high_too = float("inf"), MINUS_INFINITY, float("inf"), MINUS_INFINITY
    for e in range(half):
        z, other = scores[e], scores[half + e]
        low, high = min(low, z if z > MINUS_INFINITY else low), max(high, z)
        low_too, high_too = min(low_too, other if other > MINUS_INFINITY else low_too), max(high_too, other)
    if len(scores) % 2 == 1 and scores[-1] > MINUS_INFINITY:
        low, high = min(low, scores[-1]), max(high, scores[-1])
    return max(high, high_too) - min(low, low_too)


def mean(scores):
    """Return the mean of the finite scores."""
    total, count = 0.0, 0
    for z in scores:
        if z > MINUS_INFINITY:
            total, count = total + z, count + 1
    return total / count


POLICY = Routing(
    name="cache_prior",
    summary="raise the scores of resident experts before the top-k",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 §3.3",
    params=PARAMS,
    memory=Memory(rows=2, reals=2),
    needs=always("logits"),
    choose=choose,
    reads=frozenset({"choice", "ids", "weight"}),
)
