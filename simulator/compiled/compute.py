"""Compute, a state machine: a step begins, its gate opens, experts are looked up and computed, the step ends.

Its program counter says what it does next. It goes on at once, or is busy, or waits (`clock`); every state is in the
machine code once.
"""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.cache import end_step, has_run, unpin
from moereplay.simulator.compiled.clock import advance, busy, cpu_is_busy, stop, wait, wake_links
from moereplay.simulator.compiled.costs import cost_of, dense_cost, lasting, lasts
from moereplay.simulator.compiled.counters import (
    DENSE_NS,
    EXPERT_NS,
    STALL_NS,
    begin_pass,
    count,
    count_here,
    end_pass,
    open_page,
)
from moereplay.simulator.compiled.cpu import start_cpu
from moereplay.simulator.compiled.errors import STOPPED, TOO_LATE, fail
from moereplay.simulator.compiled.fidelity import count_changed, count_unchanged
from moereplay.simulator.compiled.gate import (
    close_gate,
    has_come,
    has_had_its_turn,
    look_up,
    open_gate,
    suggest,
    use_all,
)
from moereplay.simulator.compiled.link import any_announced
from moereplay.simulator.compiled.links import any_in_flight, fetch_announced, next_landing, nothing_queued
from moereplay.simulator.compiled.loading import begin_loading, fetch_all_announced, load, next_load
from moereplay.simulator.compiled.log import BY_COMPUTE, IS_DENSE, IS_EXPERT, NO_COPY, span
from moereplay.simulator.compiled.reset import reset_if_due
from moereplay.simulator.compiled.rows import row_at
from moereplay.simulator.compiled.served import HIT
from moereplay.simulator.compiled.state import (
    accesses,
    expert_of,
    kept,
    now,
    pass_phase,
    pass_position,
    pass_request,
    pass_start,
    pass_tokens,
    ran,
    ready,
    slot,
    stop_flag,
)
from moereplay.simulator.jit.marks import called, fast
from moereplay.simulator.platform import LATEST_NS

STEP, GATE, LOOK, SUGGEST, SHARE, LOAD, LOADED, START, TURN, RAN, END, OVER = range(12)
NO_TURN, WAIT, ROUND = -1, -2, -3


@fast
def run_compute(s, hooks):
    """What compute does next."""
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
    elif at == GATE:
        begin_gate(s)
        open_gate(s, hooks)
        suggest_if(s, s["sequential"] == 1 and s["after_demand"] == 0, LOOK)
    elif at == END:
        finish_step(s)
    elif at == STEP:
        begin_step(s)
    elif s["has_loading"] == 1:
        go_on_loading(s, at)


@fast
def go_to(s, state):
    """Where compute goes on."""
    s["compute"]["program_counter"] = state


@fast
def busy_until(s, spent, state):
    """Compute is busy for so long, then goes on there."""
    busy(s, spent)
    go_to(s, state)


@fast
def suggest_if(s, due, then):
    """On to `then`, by way of the prefetch policy if there is one and it is its time."""
    if due and s["has_suggest"] == 1:
        s["compute"]["then"] = then
        go_to(s, SUGGEST)
    else:
        go_to(s, then)


@fast
def is_over(s):
    """Whether every pass has been computed."""
    return s["compute"]["program_counter"] == OVER


# passes and steps


@called
def begin_step(s):
    """The execution point moves on; compute spends the dense part."""
    if stop_flag(s)["requested"] == 1:
        fail(s, STOPPED, 0)
    if s["clock"]["time"] > LATEST_NS:
        fail(s, TOO_LATE, 0)
    index, layer = s["compute"]["index"], s["compute"]["layer"]
    if index == s["passes"]:
        go_to(s, OVER)
        stop(s)
        return
    if layer == 0:
        begin_forward(s)
    point(s, index, layer)
    dense = dense_cost(s, index, layer)
    count_here(s, DENSE_NS, dense)
    span(s, IS_DENSE, NO_COPY, 0, dense, BY_COMPUTE)
    busy_until(s, dense, GATE)


@fast
def point(s, index, layer):
    """The execution point that policies see."""
    here = now(s)
    here["pass"], here["layer"], here["step"] = index, layer, index * s["layers"] + layer
    here["phase"], here["tokens"] = pass_phase(s)[index], s["compute"]["tokens"]
    here["request"], here["clock"] = pass_request(s)[index], s["compute"]["start"]
    here["position"] = pass_position(s)[index]
    close_gate(s)
    open_page(s, layer)


@called
def begin_forward(s):
    """A pass begins, after the reset that may be due."""
    compute = s["compute"]
    index = compute["index"]
    reset_if_due(s, index)
    compute["start"], compute["tokens"] = pass_start(s)[index], pass_tokens(s)[index]
    compute["began"] = s["clock"]["time"]
    begin_pass(s, index, compute["tokens"])


@fast
def begin_gate(s):
    """Nothing of the step has been looked up or computed."""
    compute = s["compute"]
    compute["gated_at"], compute["spent"], compute["coming"] = s["clock"]["time"], 0, 0
    compute["turn"], compute["looked_up"], compute["gathered"] = 0, 0, 0


@fast
def expect(s, coming):
    """So many experts wait for the link."""
    s["compute"]["coming"] = coming


@called
def finish_step(s):
    """The step's end, in the event that ended its last activity."""
    layer = now(s)["layer"]
    if s["demand"]["changed"] == 1:
        count_changed(s, layer)
    else:
        count_unchanged(s, layer)
    if s["keeps"] == 1:
        keep(s, layer)
    count(s, STALL_NS, layer, stalled(s))
    end_step(s)
    go_to(s, STEP)
    move_on(s)


@fast
def stalled(s):
    """For how long compute has waited since the step's gate, ns."""
    return s["clock"]["time"] - s["compute"]["gated_at"] - s["compute"]["spent"]


@fast
def move_on(s):
    """To the next layer, or the next pass."""
    compute = s["compute"]
    compute["layer"] += 1
    if compute["layer"] == s["layers"]:
        compute["layer"] = 0
        end_pass(s, compute["began"])
        compute["index"] += 1


@called
def keep(s, layer):
    """What every row ran, for those who ask."""
    for t in range(s["compute"]["tokens"]):
        for j in range(s["width"]):
            kept(s)[row_at(s, t), layer, j] = ran(s)[t, j]


# experts


@fast
def look(s, hooks):
    """Contract `atomic`: all demanded experts meet the cache at the gate; `sequential`: the next one, as it is now."""
    compute, sequential = s["compute"], s["sequential"] == 1
    first = compute["looked_up"]
    last = min(first + 1, s["demand"]["demanded"]) if sequential else s["demand"]["demanded"]
    compute["looked_up"], compute["turn"] = last, 0
    look_up(s, hooks, first, last)
    compute["coming"] += use_all(s, hooks)
    suggest_if(s, not sequential and s["after_demand"] == 0 and not any_announced(s), SHARE)


@called
def share(s):
    """The CPU's share begins, and after the gate of contract `atomic` the links are woken."""
    if s["has_resolve"] == 1:
        start_cpu(s)
    go_to(s, TURN)
    if any_announced(s):
        begin_loading(s)
        go_to(s, LOAD)
    if s["sequential"] == 0:
        wake_links(s)


@called
def go_on_loading(s, at):
    """Begin to load, queue what is loaded if reads may begin, or wake the links for the step's other experts."""
    if at == LOAD:
        begin_load(s)
    elif at == LOADED:
        if s["waits_for_all"] == 0:
            fetch_announced(s, accesses(s)[s["compute"]["running"]]["y"])
        go_to(s, LOAD)
    else:
        go_to(s, TURN)
        wake_links(s)


@fast
def begin_load(s):
    """The next demand is loaded; after the last, contract `atomic`, the prefetch policy has its time."""
    turn = next_load(s)
    if turn == NONE:
        if s["waits_for_all"] == 1:
            fetch_all_announced(s)
        atomic = s["sequential"] == 0
        suggest_if(s, atomic and s["after_demand"] == 0, START if atomic else TURN)
        return
    spent = load(s, turn)
    spend(s, spent)
    s["compute"]["running"] = turn
    busy_until(s, spent, LOADED)


@called
def take_turn(s):
    """The next expert to compute, a wait, the next look-up, or the step's end."""
    turn = next_turn(s)
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
        if s["compute"]["looked_up"] < s["demand"]["demanded"]:
            go_to(s, LOOK)
        else:
            suggest_if(s, s["after_demand"] == 1, END)


@called
def next_turn(s):
    """The access to compute, WAIT or NO_TURN: hits in order, then arrivals as they come, then the CPU's share."""
    compute = s["compute"]
    if s["waits_for_all"] == 1 and compute["gathered"] == 0:
        if not all_here(s):
            return WAIT
        gather(s)
    while compute["turn"] < s["gate"]["served"]:
        compute["turn"] += 1
        if accesses(s)[compute["turn"] - 1]["served"] == HIT:
            return compute["turn"] - 1
    if s["waits_for_all"] == 1 and compute["coming"] > 0:
        compute["gathered"] = 0
        return ROUND
    if compute["coming"] == 0:
        return WAIT if cpu_is_busy(s) else NO_TURN
    if not has_arrived(s):
        return WAIT
    return slot(s)[expert_of(s, take_arrived(s)) - now(s)["layer"] * s["experts"]]


@called
def all_here(s):
    """Whether all that is awaited has arrived, or none can before something that is there is computed."""
    here = s["link"]["ready_end"] - s["compute"]["ready_first"]
    if here == s["compute"]["coming"]:
        return True
    if any_in_flight(s):
        return False
    for i in range(s["gate"]["served"]):
        if accesses(s)[i]["served"] == HIT:
            return True
    return here > 0


@called
def gather(s):
    """What has arrived is computed with what was there, in demand order."""
    while has_arrived(s):
        has_come(s, slot(s)[expert_of(s, take_arrived(s)) - now(s)["layer"] * s["experts"]])
    s["compute"]["turn"], s["compute"]["gathered"] = 0, 1


@fast
def has_arrived(s):
    """Whether a copy that compute waits for is there."""
    return s["compute"]["ready_first"] < s["link"]["ready_end"]


@fast
def take_arrived(s):
    """The copy that arrived first of those not computed yet."""
    y = ready(s)[s["compute"]["ready_first"] & (s["n_ring"] - 1)]
    s["compute"]["ready_first"] += 1
    s["compute"]["coming"] -= 1
    return y


@fast
def nothing_else_until(s, end):
    """Whether compute alone has events up to then, and the links nothing to start: no need to ask who is next."""
    return s["external"] == 0 and nothing_queued(s) and next_landing(s) > end and s["clock"]["cpu_at"] > end


@called
def run_expert(s, turn):
    """One expert starts; returns for how long, ns."""
    spent = cost_of(s, turn)
    length = lasting(s, accesses(s)[turn]["y"], spent)
    s["compute"]["running"] = turn
    spend(s, spent)
    count(s, EXPERT_NS, now(s)["layer"], spent)
    span(s, IS_EXPERT, accesses(s)[turn]["y"], 0, length, BY_COMPUTE)
    if s["waits_for_all"] == 1:
        has_had_its_turn(s, turn)
    return length


@fast
def spend(s, spent):
    """Compute's time in this step, ns."""
    s["compute"]["spent"] += spent


@called
def finish_expert(s):
    """Its compute has ended."""
    access = accesses(s)[s["compute"]["running"]]
    has_run(s, access["x"], access["y"])
    if s["sequential"] == 1:
        unpin(s, access["y"])
    go_to(s, TURN)
