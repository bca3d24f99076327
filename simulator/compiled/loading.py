"""Loading: compute's own work on each demand, and on each prefetch if the platform says so, before its transfer."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.clock import advance, wake_links
from moereplay.simulator.compiled.counters import BY_DEMAND, BY_PREFETCH, IS_LOAD, LOADING_NS, count, span
from moereplay.simulator.compiled.link import any_announced
from moereplay.simulator.compiled.links import (
    any_to_load,
    fetch_announced,
    first_to_load,
    nothing_else_until,
    prefetch_loaded,
)
from moereplay.simulator.compiled.program import (
    CLOSE,
    LOAD,
    LOADED,
    PRELOAD,
    PRELOADED,
    BEGIN,
    TURN,
    busy_until,
    go_to,
    spend,
    suggest_if,
    work_on,
)
from moereplay.simulator.compiled.state import FETCH, kind_of
from moereplay.simulator.jit.marks import called, fast


@fast
def begin_loading(s):
    """Start again at the first access."""
    s["loading"]["next"] = 0


@called
def next_load(s):
    """Return the next access to be fetched, in demand order, or NONE."""
    while s["loading"]["next"] < s["gate"]["served"]:
        s["loading"]["next"] += 1
        if s.accesses[s["loading"]["next"] - 1]["served"] == FETCH:
            return s["loading"]["next"] - 1
    return NONE


@fast
def fetch_all_announced(s):
    """Queue all loaded demands, in demand order."""
    begin_loading(s)
    while any_announced(s):
        fetch_announced(s, s.accesses[next_load(s)]["y"])


@fast
def load(s, i):
    """Begin to load the i-th access; return the time that compute spends on it, ns."""
    return load_copy(s, s.accesses[i]["y"], BY_DEMAND)


@called
def load_copy(s, y, cause):
    """Begin to load copy y; return the time that compute spends on it, ns."""
    spent = s.load_ns[kind_of(s, y)]
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
        spent = load_copy(s, first_to_load(s), BY_PREFETCH)
        spend(s, spent)
        busy_until(s, spent, PRELOADED)
    elif at == PRELOADED:
        prefetch_loaded(s)
        go_to(s, PRELOAD if any_to_load(s) else after_preloads(s))
    else:
        go_to(s, PRELOAD if any_to_load(s) else TURN)
        wake_links(s)


@fast
def hand_over(s, turn):
    """Queue a demand that was loaded, unless those of a step are queued together."""
    if not queues_together(s):
        fetch_announced(s, s.accesses[turn]["y"])


@fast
def after_preloads(s):
    """Return the state that follows when all prefetches are loaded."""
    if s["after_demand"] == 1:
        return CLOSE
    return TURN if s["sequential"] == 1 else BEGIN


@fast
def begin_load(s):
    """Load the next demand. After the last one, contract `atomic`, call the prefetch policy."""
    turn = next_load(s)
    # a load during which no other event is due takes no pass through the event loop
    while turn != NONE and nothing_else_until(s, s["clock"]["time"] + s.load_ns[kind_of(s, s.accesses[turn]["y"])]):
        spent = load(s, turn)
        spend(s, spent)
        advance(s, s["clock"]["time"] + spent)
        hand_over(s, turn)
        turn = next_load(s)
    if turn == NONE:
        if queues_together(s):
            fetch_all_announced(s)
        atomic = s["sequential"] == 0
        suggest_if(s, atomic and s["after_demand"] == 0, BEGIN if atomic else after_load(s))
        return
    spent = load(s, turn)
    spend(s, spent)
    work_on(s, turn)
    busy_until(s, spent, LOADED)


@fast
def after_load(s):
    """Return the state after the load of the current expert, contract `sequential`."""
    return PRELOAD if any_to_load(s) else TURN
