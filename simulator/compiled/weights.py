"""Weights of what the tokens run, and the union of their demand: `traces.routers` and `traces.demand`, to the bit.

A weight is made of shares, which the trace holds, by + * / in float64 in the order of ranks (or of ids, where the rule
sums over experts), rounded to float32 and then to UNITs.
"""

from __future__ import annotations

import numpy as np

from moereplay.policies.contract import NONE, UNIT
from moereplay.simulator.compiled.errors import NO_LOGITS, fail
from moereplay.simulator.compiled.rows import token_at
from moereplay.simulator.compiled.state import (
    all_eligible,
    anew,
    ids,
    now,
    ran,
    rule,
    token_ids,
    token_logits,
    token_shares,
    token_weights,
    units,
)
from moereplay.simulator.jit.marks import called, fast

FAMILIES = ("softmax_topk", "topk_softmax", "sparsemixer", "softmax_groups", "sigmoid_groups")
SPARSEMIXER = FAMILIES.index("sparsemixer")


@fast
def to_units(weight):
    """round(weight * UNIT), half to even."""
    return np.int64(np.rint(np.float64(np.float32(weight)) * UNIT))


@called
def weigh_run(s):
    """Weights of what the tokens run: the router's own where a token keeps its experts, else from the logits.

    With nothing to weigh by they are 0; returns 1 then, as the union goes by ranks.
    """
    some = any_reweighed(s)
    if some:
        weigh(s)
    if s["weighted"] == 1 or not some:
        for t in range(s["compute"]["tokens"]):
            if anew(s)[t] == 0:
                keep_weights(s, t)
    return 1 if s["weighted"] == 0 and not some else 0


@called
def keep_weights(s, t):
    """What the router gave to those of its experts that a token runs."""
    at, layer = token_at(s, t), now(s)["layer"]
    for j in range(s["width"]):
        units(s)[t, j] = 0
        place = last_place(token_ids(s)[at, layer], ran(s)[t, j])
        if place != NONE and s["weighted"] == 1:
            units(s)[t, j] = to_units(token_weights(s)[at, layer, place])


@called
def any_reweighed(s):
    """Whether any token of the step is weighed anew; which ones is noted."""
    some = False
    for t in range(s["compute"]["tokens"]):
        anew(s)[t] = 1 if is_reweighed(s, t) else 0
        some = some or anew(s)[t] == 1
    return some


@called
def is_reweighed(s, t):
    """Whether a token was routed to fewer experts than its router chose, or runs one that is not its own.

    Otherwise every expert keeps the weight that the router gave it, and one dropped at a miss leaves the others' as
    they were.
    """
    own, routed, run = token_ids(s)[token_at(s, t), now(s)["layer"]], ids(s)[t], ran(s)[t]
    fewer = 0
    for j in range(s["width"]):
        if run[j] != NONE and last_place(own, run[j]) == NONE:
            return True
        fewer += (1 if own[j] != NONE else 0) - (1 if routed[j] != NONE else 0)
    return fewer > 0


@called
def last_place(row, e):
    """The last place of an expert in a row, or NONE."""
    place = NONE
    for j in range(len(row)):  # no branch: many at a time
        place = j if row[j] == e else place
    return place if e != NONE else NONE


@called
def weigh(s):
    """Weights in UNITs, from the unmodified logits, of the experts that the step's tokens run; -1 weighs 0."""
    if s["scored"] == 0:
        fail(s, NO_LOGITS, 0)
        return
    layer = now(s)["layer"]
    for t in range(s["compute"]["tokens"]):
        share = token_shares(s)[token_at(s, t), layer]
        if rule(s)["family"] == SPARSEMIXER:
            weigh_near(
                rule(s),
                share,
                token_logits(s)[token_at(s, t), layer],
                ran(s)[t],
                all_eligible(s),
                units(s)[t],
            )
        else:
            weigh_shares(rule(s), share, ran(s)[t], units(s)[t])


@called
def weigh_shares(rule, share, ids, units):
    """Each id's share, or its share of their sum if the rule says so."""
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
    """Each id's share of those experts that no id before it took and that are not far below it."""
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
    """The shares, in id order, of the experts left whose distance below the pick is inside the band."""
    reference, total = logits[pick], 0.0
    for e in range(len(logits)):
        size = max(abs(logits[e]), reference)
        gap = (reference - logits[e]) / size if size != 0 else np.float32(0)
        if taken[e] == 0 and gap <= rule["band"]:
            total += np.float64(share[e])
    return total
