"""Misses that are not fetched for every token: dropped experts, and resident ones that stand in for a missing one."""

from __future__ import annotations

from policies.contract import NONE, RESIDENT
from simulator.compiled import counters
from simulator.compiled.cache import find_any
from simulator.compiled.counters import count
from simulator.compiled.demand import unite
from simulator.compiled.runtime.jit import called
from simulator.compiled.runtime.state import (
    BAD_STAND_IN,
    NO_HOOK,
    accesses,
    eligible,
    final_expert,
    final_mass,
    final_rank,
    final_sum,
    final_tokens,
    now,
    others,
    ran,
    slot,
    stand_ins,
)
from simulator.compiled.served import DROPPED, HIT, REPLACED, runs
from simulator.compiled.weights import weigh_run


@called
def drop(w, access):
    """No token runs it."""
    access["served"] = DROPPED
    e = access["x"] - now(w)["layer"] * w["experts"]
    for t in range(w["tokens"]):
        for j in range(w["width"]):
            if ran(w)[t, j] == e:
                ran(w)[t, j] = NONE
    w["changed"] = 1
    count(w, counters.DROPPED, now(w)["layer"], 1)


@called
def substitute(w, hook, access):
    """Ask token by token; the expert is fetched, most precise, if any token still needs it."""
    if w["has_substitute"] == 0:
        w["error"] = NO_HOOK
        return
    for e in range(w["experts"]):
        stand_ins(w)[e] = 0
    needed, e = 0, access["x"] - now(w)["layer"] * w["experts"]
    for t in range(w["tokens"]):
        j = first_place(ran(w)[t], e)
        if j == NONE:
            continue
        other = ask_token(w, hook, t, j)
        if other == NONE:
            needed += 1
            continue
        if not (0 <= other < w["experts"] and eligible(w)[other] == 1):
            w["error"], w["culprit"] = BAD_STAND_IN, other
            return
        ran(w)[t, j] = other
        stand_ins(w)[other] += 1
        w["changed"], w["substituted"] = 1, 1
        count(w, counters.SUBSTITUTED, now(w)["layer"], 1)
    access["tokens"], access["y"] = needed, access["x"] * w["precisions"]
    if needed == 0:
        access["served"] = REPLACED


@called
def ask_token(w, hook, t, j):
    """The expert that stands in for a token's j-th one, or NONE."""
    base = now(w)["layer"] * w["experts"]
    for e in range(w["experts"]):
        resident = find_any(w, base + e, RESIDENT) != NONE
        eligible(w)[e] = 1 if resident and first_place(ran(w)[t], e) == NONE else 0
    return hook(w, t, j)


@called
def first_place(row, e):
    """The first place of e in the row, or NONE."""
    for j in range(len(row)):
        if row[j] == e:
            return j
    return NONE


# the demand again


@called
def reunite(w):
    """Contract `atomic`: the demand is united again; substitutes are used, but are no accesses."""
    weigh_run(w)
    united = unite(w, final_expert(w), final_rank(w), final_mass(w), final_sum(w), final_tokens(w))
    base, total = now(w)["layer"] * w["experts"], united
    for i in range(w["served"]):
        slot(w)[accesses(w)[i]["x"] - base] = i
    for i in range(united):
        serve(w, others(w)[i], final_expert(w)[i], final_tokens(w)[i])
    for i in range(w["served"]):
        slot(w)[accesses(w)[i]["x"] - base] = NONE
        if not runs(accesses(w)[i]["served"]):
            others(w)[total] = accesses(w)[i]
            total += 1
    for i in range(total):
        accesses(w)[i] = others(w)[i]
    w["served"] = total


@called
def serve(w, access, x, tokens):
    """One expert of the new demand: as it is served already, or a hit of a substitute."""
    known = slot(w)[x - now(w)["layer"] * w["experts"]]
    if known == NONE:
        stand_in(w, access, x, tokens)
        return
    old = accesses(w)[known]
    old["tokens"] = tokens
    access["n"], access["x"], access["y"], access["tokens"] = old["n"], old["x"], old["y"], tokens
    access["served"] = old["served"]


@called
def stand_in(w, access, x, tokens):
    """A substitute: used, but no access."""
    access["n"], access["x"], access["y"], access["tokens"] = NONE, x, find_any(w, x, RESIDENT), tokens
    access["served"] = HIT


@called
def add_stand_ins(w):
    """Contract `sequential`: the substitutes of the access at hand follow it, lowest id first."""
    base = now(w)["layer"] * w["experts"]
    for e in range(w["experts"]):
        if stand_ins(w)[e] > 0:
            stand_in(w, accesses(w)[w["served"]], base + e, stand_ins(w)[e])
            w["served"] += 1
    w["substituted"] = 0
