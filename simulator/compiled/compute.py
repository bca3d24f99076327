"""Compute's story, place by place: a step begins, its gate opens, experts are looked up and computed, the step ends.

From one place compute goes on to the next at once, or is busy, or waits, until an event of its own: `kernel` keeps the
clock. Every place is in the machine code once.
"""

from __future__ import annotations

from simulator.compiled import counters
from simulator.compiled.cache import computed, end_step, release
from simulator.compiled.counters import begin_pass, count, count_here, end_pass
from simulator.compiled.fidelity import count_changed, count_unchanged
from simulator.compiled.gate import clear_slots, look_up, open_gate, suggest, use_all
from simulator.compiled.link import next_landing
from simulator.compiled.log import BY_COMPUTE, BY_MISS, IS_CPU, IS_DENSE, IS_EXPERT, NO_COPY, span
from simulator.compiled.reset import reset, reset_due
from simulator.compiled.runtime.jit import called, fast
from simulator.compiled.runtime.ranking import touch
from simulator.compiled.runtime.state import (
    NO_CPU,
    NOT_SOON,
    STOPPED,
    accesses,
    cost_row,
    cpu_ns,
    dense_ns,
    dense_row,
    expert_ns,
    expert_of,
    experts,
    kept,
    kind_of,
    now,
    pass_phase,
    pass_request,
    pass_start,
    pass_tokens,
    ran,
    ready,
    slot,
    slow_cpu_ns,
    stop,
)
from simulator.compiled.served import HIT, ON_CPU
from simulator.compiled.substitution import add_stand_ins, reunite

STEP, GATE, LOOK, SUGGEST, SHARE, TURN, RAN, END, OVER = range(9)
NOBODY, WAIT = -1, -2


@fast
def go_on(w, hooks):
    """What compute does next."""
    place = w["place"]
    if place == TURN:
        take_turn(w)
    elif place == RAN:
        finish_expert(w)
    elif place == LOOK:
        look(w, hooks)
    elif place == SHARE:
        share(w)
    elif place == SUGGEST:
        suggest(w, hooks)
        w["place"] = w["then"]
    elif place == GATE:
        open_gate(w, hooks)
        suggest_if(w, w["sequential"] == 1 and w["after_demand"] == 0, LOOK)
    elif place == END:
        finish_step(w)
    else:
        begin_step(w)


@fast
def busy(w, spent, place):
    """Compute is busy, then goes on at `place`; the link is woken now."""
    w["compute_at"] = w["time"] + spent
    w["place"] = place
    w["go"], w["wake"] = 0, 1


@fast
def suggest_if(w, due, then):
    """On to `then`, by way of the prefetch policy if there is one and it is its time."""
    w["place"], w["then"] = then, then
    if due and w["has_suggest"] == 1:
        w["place"] = SUGGEST


# passes and steps


@called
def begin_step(w):
    """The execution point moves on; compute spends the dense part."""
    if stop(w)["asked"] == 1:
        w["error"] = STOPPED
    index, layer = w["index"], w["layer"]
    if index == w["passes"]:
        w["place"], w["go"] = OVER, 0
        return
    if layer == 0:
        begin_forward(w)
    here = now(w)
    here["pass"], here["layer"], here["step"], here["gated"] = index, layer, index * w["layers"] + layer, 0
    here["phase"], here["tokens"], here["request"] = pass_phase(w)[index], w["tokens"], pass_request(w)[index]
    w["page"] = (layer * 2 + here["phase"]) * counters.WIDTH
    dense = dense_ns(w)[dense_row(w)[index], layer]
    count_here(w, counters.DENSE_NS, dense)
    span(w, IS_DENSE, NO_COPY, 0, dense, BY_COMPUTE)
    here["clock"], here["position"] = w["start"], w["start"] - w["request_began"]
    busy(w, dense, GATE)


@called
def begin_forward(w):
    """A pass begins, after the reset that may be due."""
    if reset_due(w):
        reset(w)
    index = w["index"]
    w["start"], w["tokens"] = pass_start(w)[index], pass_tokens(w)[index]
    if index == 0 or pass_request(w)[index] != pass_request(w)[index - 1]:
        w["request_began"] = w["start"]
    w["since_reset"] += w["tokens"]
    w["began"] = w["time"]
    begin_pass(w)


@called
def finish_step(w):
    """The step's end, in the event that ended its last activity."""
    layer = now(w)["layer"]
    if w["changed"] == 1:
        count_changed(w, layer)
    else:
        count_unchanged(w, layer)
    if w["keeps"] == 1:
        keep(w, layer)
    count(w, counters.STALL_NS, layer, w["time"] - w["gated_at"] - w["spent"])
    end_step(w)
    w["place"] = STEP
    move_on(w)


@fast
def move_on(w):
    """To the next layer, or the next pass."""
    w["layer"] += 1
    if w["layer"] == w["layers"]:
        w["layer"] = 0
        end_pass(w)
        w["index"] += 1


@called
def keep(w, layer):
    """What every token ran, for those who ask."""
    for t in range(w["tokens"]):
        for j in range(w["width"]):
            kept(w)[w["start"] + t, layer, j] = ran(w)[t, j]


# experts


@fast
def look(w, hooks):
    """Contract `atomic`: all demanded experts meet the cache at the gate; `sequential`: the next one, as it is now."""
    first, sequential = w["looked_up"], w["sequential"] == 1
    last = min(first + 1, w["demanded"]) if sequential else w["demanded"]
    w["looked_up"], w["turn"] = last, 0
    look_up(w, hooks, first, last)
    if w["substituted"] == 1:
        if sequential:
            add_stand_ins(w)
        else:
            reunite(w)
    use_all(w, hooks)
    suggest_if(w, not sequential and w["after_demand"] == 0, SHARE)


@called
def share(w):
    """The CPU's share begins, and after the gate of contract `atomic` the link is woken."""
    if w["has_resolve"] == 1:
        start_cpu(w)
    w["place"] = TURN
    if w["sequential"] == 0:
        w["wake"] = 1


@called
def start_cpu(w):
    """The CPU takes its share one after the other, beside link and compute."""
    after, contended = 0, link_is_busy(w)
    w["beside_cpu"] = 0
    for i in range(w["served"]):
        access = accesses(w)[i]
        if access["served"] == ON_CPU:
            if w["has_cpu"] == 0:
                w["error"] = NO_CPU
                return
            size, tokens = cost_row(w)[kind_of(w, access["y"])], access["tokens"]
            spent = slow_cpu_ns(w)[size, tokens] if contended else cpu_ns(w)[size, tokens]
            span(w, IS_CPU, access["y"], after, spent, BY_MISS)
            after += spent
            w["cpu_at"], w["beside_cpu"] = w["time"] + after, 1


@fast
def link_is_busy(w):
    """Whether something is on its way, or a demand is about to be."""
    return w["flight_first"] < w["flight_end"] or w["demand_first"] < w["demand_end"]


@called
def take_turn(w):
    """The next expert to compute, a wait, the next look-up, or the step's end."""
    turn = next_turn(w)
    while turn >= 0 and nothing_else_until(w, w["time"] + cost_of(w, turn)):
        w["time"] += run_expert(w, turn)
        finish_expert(w)
        turn = next_turn(w)
    if turn == WAIT:
        w["waiting"], w["go"], w["wake"] = 1, 0, 1
    elif turn != NOBODY:
        busy(w, run_expert(w, turn), RAN)
    else:
        clear_slots(w)
        if w["looked_up"] < w["demanded"]:
            w["place"] = LOOK
        else:
            suggest_if(w, w["after_demand"] == 1, END)


@called
def next_turn(w):
    """The access to compute, WAIT or NOBODY: hits in order, then arrivals as they come, then the CPU's share."""
    while w["turn"] < w["served"]:
        w["turn"] += 1
        if accesses(w)[w["turn"] - 1]["served"] == HIT:
            return w["turn"] - 1
    if w["coming"] == 0:
        return NOBODY if w["cpu_at"] == NOT_SOON else WAIT
    if w["ready_first"] == w["ready_end"]:
        return WAIT
    y = ready(w)[w["ready_first"] & (w["n_ring"] - 1)]
    w["ready_first"] += 1
    w["coming"] -= 1
    return slot(w)[expert_of(w, y) - now(w)["layer"] * w["experts"]]


@fast
def cost_of(w, turn):
    """What computing one expert over its tokens takes."""
    access = accesses(w)[turn]
    return expert_ns(w)[cost_row(w)[kind_of(w, access["y"])], access["tokens"]]


@fast
def nothing_else_until(w, end):
    """Whether compute alone has events up to then, and the link nothing to start: no need to ask who is next."""
    idle = w["demand_first"] == w["demand_end"] and w["ask_first"] == w["ask_end"]
    return idle and next_landing(w) > end and w["cpu_at"] > end


@called
def run_expert(w, turn):
    """One expert starts; returns for how long."""
    spent = cost_of(w, turn)
    w["running"] = turn
    w["spent"] += spent
    count(w, counters.EXPERT_NS, now(w)["layer"], spent)
    span(w, IS_EXPERT, accesses(w)[turn]["y"], 0, spent, BY_COMPUTE)
    return spent


@called
def finish_expert(w):
    """Its compute has ended."""
    access = accesses(w)[w["running"]]
    experts(w)[access["x"]]["needed"] = 0
    if w["minds_demand"] == 1:
        touch(w, access["x"])
    computed(w, access["y"])
    if w["sequential"] == 1:
        release(w, access["y"])
    w["place"] = TURN
