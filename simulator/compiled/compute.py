"""Compute as a state machine: begin a step, open its gate, look up and run its experts, end the step.

A program counter selects the next action. Each action makes compute continue at once, stay busy for a time, or wait
(`clock`). Every state appears in the machine code once.
"""

from __future__ import annotations

from moereplay.policies.contract import NONE, QUEUED, RESIDENT
from moereplay.simulator.compiled.cache import end_step, mark_computed, unpin
from moereplay.simulator.compiled.clock import (
    BEGIN,
    CLOSE,
    GATE,
    LOAD,
    LOADED,
    LOOK,
    OVER,
    PRELOAD,
    PRELOADED,
    RAN,
    SHARE,
    STEP,
    SUGGEST,
    TURN,
    advance,
    busy_until,
    cpu_busy_until,
    cpu_is_busy,
    go_to,
    resume,
    stop,
    suggest_if,
    wait,
    wake_links,
)
from moereplay.simulator.compiled.counters import (
    BY_COMPUTE,
    BY_DEMAND,
    BY_MISS,
    BY_PREFETCH,
    CPU_ABSENT,
    CPU_NS,
    DENSE_NS,
    EXPERT_NS,
    IS_CPU,
    IS_DENSE,
    IS_EXPERT,
    IS_LOAD,
    IS_STAGE,
    LOADING_NS,
    STALL_NS,
    WIDTH,
    begin_pass,
    count,
    count_here,
    count_step,
    end_pass,
    span,
)
from moereplay.simulator.compiled.demand import count_changed, count_unchanged
from moereplay.simulator.compiled.gate import look_up, open_gate, set_absent, use_all
from moereplay.simulator.compiled.link import (
    NO_CPU_WAITS,
    any_announced,
    demand_waits,
    of_matrices,
    release,
    take_arrival,
)
from moereplay.simulator.compiled.links import (
    any_in_flight,
    any_link_is_busy,
    any_to_load,
    bring_for_cpu,
    cost_of,
    dense_cost,
    fetch_announced,
    first_to_load,
    lasting,
    lasts,
    nothing_else_until,
    prefetch_loaded,
    send_up,
    suggest,
)
from moereplay.simulator.compiled.passes import next_pass_begins, reset_if_due
from moereplay.simulator.compiled.state import (
    DELAYED,
    FETCH,
    HAS_RUN,
    HIT,
    IN_ROUND,
    NO_CPU,
    ON_CPU,
    STOPPED,
    TOO_LATE,
    expert_of,
    fail,
    home_of,
    kind_of,
    row_at,
    runs_here,
)
from moereplay.simulator.errors import LATEST_NS
from moereplay.simulator.interface import NO_COPY
from moereplay.simulator.jit.marks import called, fast


@fast
def spend(s, spent):
    """Add to compute's busy time in this step, ns."""
    s["compute"]["spent"] += spent


# The CPU's share of a step: misses that it computes from the tier that it reads, beside links and compute.
#
# It works on one expert at a time, first queued first served. What it has to wait for comes into its tier first.


@called
def start_cpu(s):
    """Begin with what is there, one after the other, judged once for contention; its times are known at once."""
    contended, after, cpu = any_link_is_busy(s), 0, s["cpu"]
    cpu["first"], cpu["end"], cpu["left"] = 0, 0, 0
    for i in range(s["gate"]["served"]):
        if s.accesses[i]["served"] != ON_CPU:
            continue
        if s["has_cpu"] == 0:
            fail(s, NO_CPU, 0)
            return
        cpu["left"] += 1
        if s["cpu_tier"] == 0 or s.owned[s.accesses[i]["y"]]["for_cpu"] == NO_CPU_WAITS:
            spent = cost_on_cpu(s, i, contended)
            if cpu["synced"] != s.now["step"] + 1:  # the first work of a step that is queued at its gate
                cpu["synced"] = s.now["step"] + 1
                spent += s["sync_ns"]
            begin_work(s, i, after, spent)
            after += spent
            queue_work(s, i, s["clock"]["time"] + after)
    cpu["planned"] = cpu["end"]
    if cpu["end"] > 0:
        cpu_busy_until(s, s.cpu_until[0 if s["cpu_tier"] > 0 else cpu["end"] - 1])


@fast
def cost_on_cpu(s, i, contended):
    """Return what the i-th access takes on the CPU, ns; `contended`: a link works as it begins."""
    size, tokens = s.cost_row[kind_of(s, s.accesses[i]["y"])], s.accesses[i]["tokens"]
    return s.slow_cpu_ns[size, tokens] if contended else s.cpu_ns[size, tokens]


@fast
def begin_work(s, i, after, spent):
    """Count and log a work that begins in `after` ns."""
    count(s, CPU_NS, s.now["layer"], spent)
    span(s, IS_CPU, s.accesses[i]["y"], after, spent, BY_MISS)


@fast
def queue_work(s, i, until):
    """Queue the work of the i-th access; `until`: its end, ns, if it is known."""
    s.cpu_queue[s["cpu"]["end"]], s.cpu_until[s["cpu"]["end"]] = i, until
    s["cpu"]["end"] += 1


# with a tier that the CPU reads: an event at the end of each work


@called
def end_work(s):
    """Let a copy go, begin the next work, and wake links and compute."""
    cpu = s["cpu"]
    release(s, s["cpu_tier"] - 1, s.accesses[s.cpu_queue[cpu["first"]]]["y"])
    cpu["first"] += 1
    cpu["left"] -= 1
    if cpu["first"] < cpu["planned"]:
        cpu_busy_until(s, s.cpu_until[cpu["first"]])
    elif cpu["first"] < cpu["end"]:
        begin_next(s)
    wake_links(s)
    if cpu["left"] == 0:
        resume(s)


@called
def begin_next(s):
    """Begin the first queued work, judged for contention as it begins."""
    i = s.cpu_queue[s["cpu"]["first"]]
    spent = cost_on_cpu(s, i, any_link_is_busy(s))
    begin_work(s, i, 0, spent)
    cpu_busy_until(s, s["clock"]["time"] + spent)


@called
def work_on_arrival(s):
    """Queue the work on a copy that has come, when the links have been woken; a prefetch may go on from there."""
    y = take_arrival(s)
    queue_work(s, s.slot[expert_of(s, y) - s.now["layer"] * s["experts"]], 0)
    if not cpu_is_busy(s):
        begin_next(s)
    if s["arrival"]["behind"] == 1:
        send_up(s, y, 1)
        wake_links(s)


# Loading: compute's own work on each demand, and on each prefetch if the platform says so, before its transfer.


@called
def next_load(s):
    """Return the next access to be fetched, in demand order, or NONE."""
    while s["loading"]["next"] < s["gate"]["served"]:
        s["loading"]["next"] += 1
        if s.accesses[s["loading"]["next"] - 1]["served"] == FETCH:
            return s["loading"]["next"] - 1
    return NONE


@called
def load(s, y, cause):
    """Begin to load copy y; return the time that compute spends on it, ns."""
    spent = s.load_ns[kind_of(s, y)]
    spend(s, spent)
    count(s, LOADING_NS, s.now["layer"], spent)
    span(s, IS_LOAD, y, 0, spent, cause)
    return spent


@fast
def queues_together(s):
    """Return whether demands are queued only when the last one of the step is loaded."""
    return s["waits_for_all"] == 1 or s["by_matrix"] == 1


@called
def go_on_loading(s, at):
    """Load the next demand or prefetch, queue the loaded one, or wake the links for the other experts."""
    if at == LOAD:
        begin_load(s)
    elif at == LOADED:
        hand_over(s, s["compute"]["running"])
        go_to(s, LOAD)
    elif at == PRELOAD:
        busy_until(s, load(s, first_to_load(s), BY_PREFETCH), PRELOADED)
    elif at == PRELOADED:
        prefetch_loaded(s)
        if any_to_load(s):
            go_to(s, PRELOAD)
        elif s["after_demand"] == 1:
            go_to(s, CLOSE)
        else:
            go_to(s, TURN if s["sequential"] == 1 else BEGIN)
    else:
        go_to(s, PRELOAD if any_to_load(s) else TURN)
        wake_links(s)


@fast
def hand_over(s, turn):
    """Queue a demand that was loaded, unless those of a step are queued together."""
    if not queues_together(s):
        fetch_announced(s, s.accesses[turn]["y"])


@fast
def begin_load(s):
    """Load the next demand. After the last one, contract `atomic`, call the prefetch policy."""
    turn = next_load(s)
    # a load during which no other event is due takes no pass through the event loop
    while turn != NONE and nothing_else_until(s, s["clock"]["time"] + s.load_ns[kind_of(s, s.accesses[turn]["y"])]):
        advance(s, s["clock"]["time"] + load(s, s.accesses[turn]["y"], BY_DEMAND))
        hand_over(s, turn)
        turn = next_load(s)
    if turn == NONE:
        if queues_together(s):
            s["loading"]["next"] = 0
            while any_announced(s):
                fetch_announced(s, s.accesses[next_load(s)]["y"])
        if s["sequential"] == 0:
            suggest_if(s, s["after_demand"] == 0, BEGIN)
        else:
            go_to(s, PRELOAD if any_to_load(s) else TURN)
        return
    s["compute"]["running"] = turn
    busy_until(s, load(s, s.accesses[turn]["y"], BY_DEMAND), LOADED)


# Stages of compute if links read matrix by matrix: rounds of available experts, in one stage per matrix.
#
# A round has the resident experts of the step, delayed hits, and the batches that have started. Each stage waits
# until its matrix of all of them has landed.


@called
def take_stage(s):
    """Begin the next stage or wait; return whether all experts of the look-up have been computed."""
    if s["round"]["stages"] == 0:
        if next_left(s) == NONE:
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
def next_left(s):
    """Return the first access that waits for a round, or NONE."""
    for i in range(s["gate"]["served"]):
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
        started = not demand_waits(s, link)
        for i in range(s["gate"]["served"]):
            started = started or (has_started(s, i) and home_of(s, s.accesses[i]["y"]) == link)
        if not started:
            return False
    return True


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
        s.accesses[i]["served"] = IN_ROUND
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
            y = s.accesses[i]["y"]
            if s.copies[y]["prefetch"] == 1 or s.owned[y]["parts"] < s["round"]["stage"]:
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
            s.accesses[i]["served"] = HAS_RUN
    if s["sequential"] == 0 and next_left(s) != NONE:
        wake_links(s)


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
    here["gated"] = 0
    s["counters"]["page"] = (layer * 2 + here["phase"]) * WIDTH


@fast
def begin_gate(s):
    """Open the gate, and reset the step's progress before its first look-up."""
    compute = s["compute"]
    s.now["gated"] = 1
    set_absent(s, -1)  # not known yet
    compute["gated_at"], compute["coming"], compute["spent"] = s["clock"]["time"], 0, 0
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
    count_step(s, s["gate"]["missed"])
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
    if s["cpu_tier"] > 0:  # hold what is where the CPU reads; queue the rest to come
        for i in range(s["gate"]["served"]):
            if s.accesses[i]["served"] == ON_CPU and not bring_for_cpu(s, s.accesses[i]["y"]):
                count(s, CPU_ABSENT, s.now["layer"], 1)
    compute["coming"] += use_all(s, hooks)
    suggest_if(s, not sequential and s["after_demand"] == 0 and not any_announced(s), SHARE)


@called
def share(s):
    """Start the CPU's share, begin announced loads, and wake the links (contract `atomic`)."""
    if s["has_resolve"] == 1:
        start_cpu(s)
    go_to(s, TURN)
    if any_announced(s):
        s["loading"]["next"] = 0
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
        # the CPU has experts of the look-up to compute, one that has to come first among them
        works = s["cpu"]["left"] > 0 if s["cpu_tier"] > 0 else cpu_is_busy(s)
        return WAIT if works else NO_TURN
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
        s.accesses[s.slot[expert_of(s, take_arrived(s)) - s.now["layer"] * s["experts"]]]["served"] = HIT
    s["compute"]["turn"], s["compute"]["gathered"] = 0, 1


@fast
def has_arrived(s):
    """Return whether an awaited copy has arrived and has not run."""
    return s["compute"]["ready_first"] < s["link"]["ready_end"]


@fast
def take_arrived(s):
    """Return the earliest arrival that has not run."""
    y = s.ready[s["compute"]["ready_first"] & s["ring_mask"]]
    s["compute"]["ready_first"] += 1
    s["compute"]["coming"] -= 1
    return y


@called
def run_expert(s, turn):
    """Start one expert; return its duration, ns."""
    spent = cost_of(s, turn)
    length = lasting(s, s.accesses[turn]["y"], spent)
    s["compute"]["running"] = turn
    spend(s, spent)
    count(s, EXPERT_NS, s.now["layer"], spent)
    span(s, IS_EXPERT, s.accesses[turn]["y"], 0, length, BY_COMPUTE)
    if s["waits_for_all"] == 1:
        s.accesses[turn]["served"] = HAS_RUN
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
