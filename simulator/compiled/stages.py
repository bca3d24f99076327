"""Stages of compute if links read matrix by matrix: rounds of available experts, in one stage per matrix.

A round has the resident experts of the step, delayed hits, and the batches that have started. Each stage waits until
its matrix of all of them has landed.
"""

from __future__ import annotations

from moereplay.policies.contract import NONE, QUEUED, RESIDENT
from moereplay.simulator.compiled.batches import of_matrices
from moereplay.simulator.compiled.cache import mark_computed, unpin
from moereplay.simulator.compiled.clock import cpu_is_busy, wait, wake_links
from moereplay.simulator.compiled.costs import cost_of
from moereplay.simulator.compiled.counters import BY_COMPUTE, EXPERT_NS, IS_STAGE, NO_COPY, count, span
from moereplay.simulator.compiled.gate import mark_executed, mark_in_round
from moereplay.simulator.compiled.link import demand_waits
from moereplay.simulator.compiled.links import any_in_flight
from moereplay.simulator.compiled.program import RAN, TURN, busy_until, go_to, spend
from moereplay.simulator.compiled.state import (
    DELAYED,
    FETCH,
    HIT,
    IN_ROUND,
    home_of,
    runs_here,
)
from moereplay.simulator.jit.marks import called, fast


@called
def take_stage(s):
    """Begin the next stage or wait; return whether all experts of the look-up have been computed."""
    if s["round"]["stages"] == 0:
        if next_left(s, 0) == NONE:
            if cpu_is_busy(s):
                wait(s)
                return False
            return True
        if not round_is_due(s):
            wait(s)
            return False
        open_round(s)
    if has_landed(s):
        begin_stage(s)
    else:
        wait(s)
    return False


@called
def next_left(s, first):
    """Return the first access from a place on that waits for a round, or NONE."""
    for i in range(first, s["gate"]["served"]):
        if runs_here(s.accesses[i]["served"]):
            return i
    return NONE


@called
def round_is_due(s):
    """Return whether every link that has demands has started a batch, or none can before a round has run."""
    there, awaits = False, False
    for i in range(s["gate"]["served"]):
        served = s.accesses[i]["served"]
        if served == HIT and s["sequential"] == 1:
            return True
        there = there or served == HIT or served == DELAYED or has_started(s, i)
        awaits = awaits or served == FETCH
    if not awaits:
        return True
    return there and (all_started(s) or not any_in_flight(s))


@fast
def has_started(s, i):
    """Return whether the i-th access is a demand whose batch has started."""
    return s.accesses[i]["served"] == FETCH and s.copies[s.accesses[i]["y"]]["state"] != QUEUED


@called
def all_started(s):
    """Return whether every link on which demands wait has started a batch that has not been computed."""
    for link in range(s["n_links"]):
        if demand_waits(s, link) and not link_has_started(s, link):
            return False
    return True


@called
def link_has_started(s, link):
    for i in range(s["gate"]["served"]):
        if has_started(s, i) and home_of(s, s.accesses[i]["y"]) == link:
            return True
    return False


@called
def open_round(s):
    """Collect available experts into a round; contract `sequential`: substitutes one by one, then the expert itself."""
    staged, hits = False, False
    for i in range(s["gate"]["served"]):
        hits = hits or s.accesses[i]["served"] == HIT
    for i in range(s["gate"]["served"]):
        served = s.accesses[i]["served"]
        if not runs_here(served) or (served == FETCH and not has_started(s, i)):
            continue
        if s["sequential"] == 1 and hits and served != HIT:
            continue
        staged = staged or served == FETCH or (served == DELAYED and not is_here(s, i))
        mark_in_round(s, i)
        if s["sequential"] == 1:
            break
    s["round"]["stages"], s["round"]["stage"] = s["matrices"] if staged else 1, 1
    s["round"]["whole"] = 0 if staged else 1


@fast
def is_here(s, i):
    """Return whether the copy of the i-th access is resident."""
    return s.copies[s.accesses[i]["y"]]["state"] == RESIDENT


@called
def has_landed(s):
    """Return whether what the next stage computes has landed: a matrix of batches, delayed hits as a whole."""
    for i in range(s["gate"]["served"]):
        if s.accesses[i]["served"] == IN_ROUND and not is_here(s, i):
            mine = s.owned[s.accesses[i]["y"]]
            if mine["prefetch"] == 1 or mine["parts"] < s["round"]["stage"]:
                return False
    return True


@called
def begin_stage(s):
    """Begin the next stage: one matrix of all experts of the round, or all of them if none is read."""
    spent = 0
    for i in range(s["gate"]["served"]):
        if s.accesses[i]["served"] == IN_ROUND:
            spent += cost_of(s, i)
    if s["round"]["whole"] == 0:
        stage = s["round"]["stage"]
        spent = of_matrices(s, spent, stage) - of_matrices(s, spent, stage - 1)
    spend(s, spent)
    count(s, EXPERT_NS, s.now["layer"], spent)
    span(s, IS_STAGE, NO_COPY, 0, spent, BY_COMPUTE)
    busy_until(s, spent, RAN)


@called
def finish_stage(s):
    """End a stage; after the last one all experts of the round are computed."""
    go_to(s, TURN)
    if s["round"]["stage"] < s["round"]["stages"]:
        s["round"]["stage"] += 1
        return
    s["round"]["stages"] = 0
    for i in range(s["gate"]["served"]):
        access = s.accesses[i]
        if access["served"] == IN_ROUND:
            mark_computed(s, access["x"], access["y"])
            if s["sequential"] == 1:
                unpin(s, access["y"])
            mark_executed(s, i)
    if s["sequential"] == 0 and next_left(s, 0) != NONE:
        wake_links(s)
