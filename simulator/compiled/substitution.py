"""Misses that are not fetched for every token: experts are dropped, or resident experts substitute for them."""

from __future__ import annotations

from moereplay.policies.contract import NONE, RESIDENT
from moereplay.simulator.compiled import counters
from moereplay.simulator.compiled.cache import find_any
from moereplay.simulator.compiled.counters import SUBSTITUTED, count, count_for
from moereplay.simulator.compiled.demand import mark_changed, run_instead, union_of
from moereplay.simulator.compiled.state import (
    BAD_STAND_IN,
    DROPPED,
    HIT,
    NO_HOOK,
    REPLACED,
    access_of,
    accesses,
    eligible,
    fail,
    final_expert,
    final_mass,
    final_rank,
    final_sum,
    final_tokens,
    now,
    others,
    ran,
    runs,
    stand_ins,
)
from moereplay.simulator.compiled.weights import weigh_run
from moereplay.simulator.jit.marks import called, fast


@fast
def clear_substitutes(s):
    """Clear the mark that this step has substitutes."""
    s["substitution"]["substituted"] = 0


@called
def drop(s, access):
    """Remove the expert from all tokens that run it."""
    access["served"] = DROPPED
    e = access["x"] - now(s)["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            if ran(s)[t, j] == e:
                run_instead(s, t, j, NONE)
    mark_changed(s)
    count(s, counters.DROPPED, now(s)["layer"], 1)


@called
def substitute(s, hook, access):
    """Call the policy for every token. Fetch the expert at full precision if any token still needs it."""
    if s["has_substitute"] == 0:
        fail(s, NO_HOOK, 0)
        return
    for e in range(s["experts"]):
        stand_ins(s)[e] = 0
    needed, e = 0, access["x"] - now(s)["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        j = first_place(ran(s)[t], e)
        if j == NONE:
            continue
        other = substitute_for(s, hook, t, j)
        if other == NONE:
            needed += 1
            continue
        if not is_eligible(s, t, other):
            fail(s, BAD_STAND_IN, other)
            return
        run_instead(s, t, j, other)
        stand_ins(s)[other] += 1
        s["substitution"]["substituted"] = 1
        count_for(s, t, SUBSTITUTED, now(s)["layer"], 1)
    access["tokens"], access["y"] = needed, access["x"] * s["precisions"]
    if needed == 0:
        access["served"] = REPLACED


@called
def find_residents(s):
    """Mark the layer's resident experts as eligible."""
    for e in range(s["experts"]):
        mark_if_resident(s, e)


@fast
def mark_if_resident(s, e):
    """Mark expert e of the layer as eligible if a copy is resident."""
    eligible(s)[e] = 1 if find_any(s, now(s)["layer"] * s["experts"] + e, RESIDENT) != NONE else 0


@called
def substitute_for(s, hook, t, j):
    """Return the expert that substitutes for a token's j-th one, or NONE: a resident one that it does not run."""
    for i in range(s["width"]):
        if ran(s)[t, i] != NONE:
            eligible(s)[ran(s)[t, i]] = 0
    other = hook(s, t, j)
    for i in range(s["width"]):
        if ran(s)[t, i] != NONE:
            mark_if_resident(s, ran(s)[t, i])
    return other


@fast
def is_eligible(s, t, e):
    """Return whether expert e is a resident one of the layer that the token does not run."""
    return 0 <= e < s["experts"] and eligible(s)[e] == 1 and first_place(ran(s)[t], e) == NONE


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
    union = union_of(s, by_rank, final_expert(s), final_rank(s), final_mass(s), final_sum(s), final_tokens(s))
    base, total = now(s)["layer"] * s["experts"], union
    for i in range(served):
        access_of(s)[accesses(s)[i]["x"] - base] = i
    for i in range(union):
        serve(s, others(s)[i], final_expert(s)[i], final_tokens(s)[i])
    for i in range(served):
        access_of(s)[accesses(s)[i]["x"] - base] = NONE
        if not runs(accesses(s)[i]["served"]):
            others(s)[total] = accesses(s)[i]
            total += 1
    return total


@called
def serve(s, access, x, tokens):
    """Serve an expert of the new union: as before, or as a hit if it is a substitute."""
    known = access_of(s)[x - now(s)["layer"] * s["experts"]]
    if known == NONE:
        stand_in(s, access, x, tokens)
        return
    old = accesses(s)[known]
    access["n"], access["x"], access["y"], access["tokens"] = old["n"], old["x"], old["y"], tokens
    access["served"] = old["served"]


@called
def stand_in(s, access, x, tokens):
    """Make an access of a substitute: it is used, but not counted as an access."""
    access["n"], access["x"], access["y"], access["tokens"] = NONE, x, find_any(s, x, RESIDENT), tokens
    access["served"] = HIT


@called
def add_stand_ins(s, served):
    """Append the substitutes of the current access, lowest id first (contract `sequential`); return the new length."""
    base, total = now(s)["layer"] * s["experts"], served
    for e in range(s["experts"]):
        if stand_ins(s)[e] > 0:
            stand_in(s, accesses(s)[total], base + e, stand_ins(s)[e])
            total += 1
    clear_substitutes(s)
    return total
