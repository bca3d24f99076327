"""Compute as a state machine: begin a step, open its gate, look up and run its experts, end the step.

A program counter selects the next action. Each action makes compute continue at once, stay busy for a time, or wait
(`clock`). Every state appears in the machine code once.
"""

from __future__ import annotations

from moereplay.simulator.compiled.arrivals import next_pass_begins
from moereplay.simulator.compiled.cache import end_step, mark_computed, unpin
from moereplay.simulator.compiled.clock import advance, stop, wait, wake_links
from moereplay.simulator.compiled.costs import (
    cost_of,
    dense_cost,
    lasting,
    lasts,
)
from moereplay.simulator.compiled.counters import (
    BY_COMPUTE,
    DENSE_NS,
    EXPERT_NS,
    IS_DENSE,
    IS_EXPERT,
    STALL_NS,
    begin_pass,
    count,
    count_here,
    end_pass,
    open_page,
    span,
)
from moereplay.simulator.compiled.cpu import bring, cpu_has_work, start_cpu
from moereplay.simulator.compiled.gate import (
    close_gate,
    look_up,
    mark_arrived,
    mark_executed,
    open_gate,
    use_all,
)
from moereplay.simulator.compiled.link import any_announced
from moereplay.simulator.compiled.links import any_in_flight, any_to_load, nothing_else_until
from moereplay.simulator.compiled.loading import begin_loading, go_on_loading
from moereplay.simulator.compiled.predictions import suggest
from moereplay.simulator.compiled.program import (
    CLOSE,
    GATE,
    LOAD,
    LOOK,
    OVER,
    PRELOAD,
    RAN,
    SHARE,
    STEP,
    SUGGEST,
    TURN,
    begin_spending,
    busy_until,
    go_to,
    spend,
    suggest_if,
    work_on,
)
from moereplay.simulator.compiled.reset import reset_if_due
from moereplay.simulator.compiled.stages import finish_stage, take_stage
from moereplay.simulator.compiled.state import (
    HIT,
    STOPPED,
    TOO_LATE,
    expert_of,
    fail,
    row_at,
)
from moereplay.simulator.compiled.weights import count_changed, count_unchanged
from moereplay.simulator.errors import LATEST_NS
from moereplay.simulator.interface import NO_COPY
from moereplay.simulator.jit.marks import called, fast

#: Results of `next_turn` other than an access: the step ends, compute blocks, or the links start another round.
NO_TURN, WAIT, ROUND = -1, -2, -3


@fast
def run_compute(s, hooks):
    """Perform the next action of compute."""
    at = s["compute"]["program_counter"]
    if at == TURN:
        take_turn(s)
    elif at == RAN:
        finish_expert(s)
    elif at == LOOK:
        look(s, hooks)
    elif at == SHARE:
        share(s)
    elif at == SUGGEST:
        suggest(s, hooks)
        go_to(s, s["compute"]["then"])
        if s["loads_prefetches"] == 1 and s["after_demand"] == 1 and any_to_load(s):
            go_to(s, PRELOAD)
    elif at == GATE:
        begin_gate(s)
        open_gate(s, hooks)
        suggest_if(s, s["sequential"] == 1 and s["after_demand"] == 0, LOOK)
    elif at == CLOSE:
        finish_step(s)
    elif at == STEP:
        begin_step(s)
    elif s["has_loading"] == 1:
        go_on_loading(s, at)


# passes and steps


@called
def begin_step(s):
    """Advance the execution point and start the dense part."""
    if s.stop["requested"] == 1:
        fail(s, STOPPED, 0)
    if s["clock"]["time"] > LATEST_NS:
        fail(s, TOO_LATE, 0)
    compute = s["compute"]
    index, layer = compute["index"], compute["layer"]
    if s["arrives"] == 1:
        if layer == 0 and not next_pass_begins(s):
            return
    elif index == s["passes"]:
        go_to(s, OVER)
        stop(s)
        return
    if layer == 0:
        reset_if_due(s, index)
        compute["start"], compute["tokens"] = s.pass_start[index], s.pass_tokens[index]
        compute["began"] = s["clock"]["time"]
        begin_pass(s, index, compute["tokens"])
    point(s, index, layer)
    dense = dense_cost(s, index, layer)
    count_here(s, DENSE_NS, dense)
    span(s, IS_DENSE, NO_COPY, 0, dense, BY_COMPUTE)
    busy_until(s, dense, GATE)


@fast
def point(s, index, layer):
    """Set the execution point that policies see."""
    here = s.now
    here["pass"], here["layer"], here["step"] = index, layer, index * s["layers"] + layer
    here["phase"], here["tokens"] = s.pass_phase[index], s["compute"]["tokens"]
    here["request"], here["clock"] = s.pass_request[index], s["compute"]["start"]
    here["position"] = s.pass_position[index]
    close_gate(s)
    open_page(s, layer)


@fast
def begin_gate(s):
    """Reset the step's progress before its first look-up."""
    compute = s["compute"]
    compute["gated_at"], compute["coming"] = s["clock"]["time"], 0
    begin_spending(s)
    compute["turn"], compute["looked_up"], compute["gathered"] = 0, 0, 0


@fast
def expect(s, coming):
    """Set the number of experts that wait for a transfer."""
    s["compute"]["coming"] = coming


@called
def finish_step(s):
    """End the step, in the event that ended its last activity."""
    layer = s.now["layer"]
    if s["demand"]["changed"] == 1:
        count_changed(s, layer)
    else:
        count_unchanged(s, layer)
    if s["keeps"] == 1:
        for t in range(s["compute"]["tokens"]):
            for j in range(s["width"]):
                s.kept[row_at(s, t), layer, j] = s.ran[t, j]
    count(s, STALL_NS, layer, stalled(s))
    end_step(s)
    go_to(s, STEP)
    move_on(s)


@fast
def stalled(s):
    """Return how long compute has waited since the step's gate, ns."""
    return s["clock"]["time"] - s["compute"]["gated_at"] - s["compute"]["spent"]


@fast
def move_on(s):
    """Advance to the next layer, or to the next pass."""
    compute = s["compute"]
    compute["layer"] += 1
    if compute["layer"] == s["layers"]:
        compute["layer"] = 0
        end_pass(s, compute["began"])
        compute["index"] += 1


# experts


@fast
def look(s, hooks):
    """Look up demanded experts: all at the gate (contract `atomic`), or the next one only (`sequential`)."""
    compute, sequential = s["compute"], s["sequential"] == 1
    first = compute["looked_up"]
    last = min(first + 1, s["demand"]["demanded"]) if sequential else s["demand"]["demanded"]
    compute["looked_up"], compute["turn"] = last, 0
    look_up(s, hooks, first, last)
    bring(s)
    compute["coming"] += use_all(s, hooks)
    suggest_if(s, not sequential and s["after_demand"] == 0 and not any_announced(s), SHARE)


@called
def share(s):
    """Start the CPU's share, begin announced loads, and wake the links (contract `atomic`)."""
    if s["has_resolve"] == 1:
        start_cpu(s)
    go_to(s, TURN)
    if any_announced(s):
        begin_loading(s)
        go_to(s, LOAD)
    elif any_to_load(s):
        go_to(s, PRELOAD)
    if s["sequential"] == 0:
        wake_links(s)


@called
def take_turn(s):
    """Run the next expert, wait, look up the next one, or end the step."""
    if s["has_stages"] == 1:
        if take_stage(s):
            end_turns(s)
        return
    turn = next_turn(s)
    # an expert during which no other event is due runs without a pass through the event loop
    while turn >= 0 and nothing_else_until(s, s["clock"]["time"] + lasts(s, turn)):
        advance(s, s["clock"]["time"] + run_expert(s, turn))
        finish_expert(s)
        turn = next_turn(s)
    if turn == WAIT:
        wait(s)
    elif s["waits_for_all"] == 1 and turn == ROUND:
        wake_links(s)
    elif turn != NO_TURN:
        busy_until(s, run_expert(s, turn), RAN)
    else:
        end_turns(s)


@fast
def end_turns(s):
    """Look up the next expert, or end the step."""
    if s["compute"]["looked_up"] < s["demand"]["demanded"]:
        go_to(s, LOOK)
    else:
        suggest_if(s, s["after_demand"] == 1, CLOSE)


@called
def next_turn(s):
    """Return the access to run, WAIT, ROUND or NO_TURN: hits in order, then arrivals, then the CPU's share."""
    compute = s["compute"]
    if s["waits_for_all"] == 1 and compute["gathered"] == 0:
        if not all_here(s):
            return WAIT
        gather(s)
    while compute["turn"] < s["gate"]["served"]:
        compute["turn"] += 1
        if s.accesses[compute["turn"] - 1]["served"] == HIT:
            return compute["turn"] - 1
    if s["waits_for_all"] == 1 and compute["coming"] > 0:
        compute["gathered"] = 0
        return ROUND
    if compute["coming"] == 0:
        return WAIT if cpu_has_work(s) else NO_TURN
    if not has_arrived(s):
        return WAIT
    return s.slot[expert_of(s, take_arrived(s)) - s.now["layer"] * s["experts"]]


@called
def all_here(s):
    """Return whether every awaited expert has arrived, or none can arrive before a resident one has run."""
    here = s["link"]["ready_end"] - s["compute"]["ready_first"]
    if here == s["compute"]["coming"]:
        return True
    if any_in_flight(s):
        return False
    for i in range(s["gate"]["served"]):
        if s.accesses[i]["served"] == HIT:
            return True
    return here > 0


@called
def gather(s):
    """Mark all arrivals as hits, so that they run with the resident experts in demand order."""
    while has_arrived(s):
        mark_arrived(s, s.slot[expert_of(s, take_arrived(s)) - s.now["layer"] * s["experts"]])
    s["compute"]["turn"], s["compute"]["gathered"] = 0, 1


@fast
def has_arrived(s):
    """Return whether an awaited copy has arrived and has not run."""
    return s["compute"]["ready_first"] < s["link"]["ready_end"]


@fast
def take_arrived(s):
    """Return the earliest arrival that has not run."""
    y = s.ready[s["compute"]["ready_first"] & (s["n_ring"] - 1)]
    s["compute"]["ready_first"] += 1
    s["compute"]["coming"] -= 1
    return y


@called
def run_expert(s, turn):
    """Start one expert; return its duration, ns."""
    spent = cost_of(s, turn)
    length = lasting(s, s.accesses[turn]["y"], spent)
    work_on(s, turn)
    spend(s, spent)
    count(s, EXPERT_NS, s.now["layer"], spent)
    span(s, IS_EXPERT, s.accesses[turn]["y"], 0, length, BY_COMPUTE)
    if s["waits_for_all"] == 1:
        mark_executed(s, turn)
    return length


@called
def finish_expert(s):
    """Release an expert whose compute has ended."""
    if s["has_stages"] == 1:
        finish_stage(s)
        return
    access = s.accesses[s["compute"]["running"]]
    mark_computed(s, access["x"], access["y"])
    if s["sequential"] == 1:
        unpin(s, access["y"])
    go_to(s, TURN)
