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
    fail,
    runs,
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
    e = access["x"] - s.now["layer"] * s["experts"]
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            if s.ran[t, j] == e:
                run_instead(s, t, j, NONE)
    mark_changed(s)
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
        if not is_eligible(s, t, other):
            fail(s, BAD_STAND_IN, other)
            return
        run_instead(s, t, j, other)
        s.stand_ins[other] += 1
        s["substitution"]["substituted"] = 1
        count_for(s, t, SUBSTITUTED, s.now["layer"], 1)
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


@fast
def is_eligible(s, t, e):
    """Return whether expert e is a resident one of the layer that the token does not run."""
    return 0 <= e < s["experts"] and s.eligible[e] == 1 and first_place(s.ran[t], e) == NONE


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
        serve(s, s.others[i], s.final_expert[i], s.final_tokens[i])
    for i in range(served):
        s.access_of[s.accesses[i]["x"] - base] = NONE
        if not runs(s.accesses[i]["served"]):
            s.others[total] = s.accesses[i]
            total += 1
    return total


@called
def serve(s, access, x, tokens):
    """Serve an expert of the new union: as before, or as a hit if it is a substitute."""
    known = s.access_of[x - s.now["layer"] * s["experts"]]
    if known == NONE:
        stand_in(s, access, x, tokens)
        return
    old = s.accesses[known]
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
    base, total = s.now["layer"] * s["experts"], served
    for e in range(s["experts"]):
        if s.stand_ins[e] > 0:
            stand_in(s, s.accesses[total], base + e, s.stand_ins[e])
            total += 1
    clear_substitutes(s)
    return total
