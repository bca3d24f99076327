"""Start, reset and end: what is resident before, what is forgotten, and what was never used."""

from __future__ import annotations

from policies.contract import ABSENT, NONE, RESIDENT
from simulator.compiled.counters import BYTES_UNUSED_AT_END, count
from simulator.compiled.log import BY_RESET, IS_RESET, NO_COPY, note
from simulator.compiled.runtime import listeners
from simulator.compiled.runtime.jit import called
from simulator.compiled.runtime.ranking import TOUCH, join_pool
from simulator.compiled.runtime.state import (
    NEVER_LEFT,
    NO_KEY,
    behind,
    copies,
    experts,
    in_front,
    keyed_pass,
    keyed_scope,
    layer_key,
    layer_marked,
    layer_of,
    layer_order,
    leaf_count,
    member_count,
    own_eviction,
    own_miss,
    own_prefetch,
    own_routing,
    owned,
    pass_request,
    pools,
    warm,
)


@called
def warm_up(w, hooks):
    """Resident before the start: unused, not prefetched, never counted."""
    for i in range(w["n_warm"]):
        y = warm(w)[i]
        copy = copies(w)[y]
        w["arrivals"] += 1
        copy["state"], copy["entered"] = RESIDENT, w["arrivals"]
        owned(w)[y]["ever"] = 1
        pools(w)[copy["pool"]]["used"] += copy["bytes"]
        join_pool(w, y)
        if w["hears_insert"] != 0:
            listeners.inserted(w, hooks, y, 0)


@called
def reset_due(w):
    """Whether everything is forgotten before this pass."""
    index = w["index"]
    if index == 0 or w["reset"] == 0:
        return False
    if w["reset"] < 0:
        return pass_request(w)[index] != pass_request(w)[index - 1]
    return w["since_reset"] >= w["reset"]


@called
def reset(w):
    """Residency, policy state, history and queue are cleared; what is in flight is abandoned."""
    note(w, IS_RESET, NO_COPY, BY_RESET)
    w["since_reset"] = 0
    for x in range(w["n_experts"]):
        clear_expert(experts(w)[x])
    for y in range(w["n_copies"]):
        clear_copy(w, y)
    clear_memory(own_routing(w))
    clear_memory(own_prefetch(w))
    clear_memory(own_eviction(w))
    clear_memory(own_miss(w))
    clear_pools(w)
    clear_order(w)
    w["demand_first"], w["ask_first"], w["flight_first"] = w["demand_end"], w["ask_end"], w["flight_end"]
    w["last_done"], w["beside_cpu"] = 0, 0


@called
def clear_expert(row):
    """As at the start, but for its future."""
    row["last_pass"], row["hint_pass"], row["last_hint"] = -1, -1, 0
    row["last_use"], row["uses_ever"], row["uses_here"], row["mass_ever"], row["needed"] = 0, 0, 0, 0, 0


@called
def clear_copy(w, y):
    """Absent, and as if it had never been here."""
    copy, mine = copies(w)[y], owned(w)[y]
    copy["state"], copy["protected"], copy["entered"], copy["prefetched"] = ABSENT, 0, 0, 0
    mine["evicted_pass"], mine["entered_step"] = NEVER_LEFT, 0
    mine["member"], mine["dirty"], mine["listed"] = 0, 0, 0
    mine["done"], mine["ever"], mine["side"], mine["streamed"] = 0, 0, 0, 0


@called
def clear_memory(own):
    """A policy's, but for its parameters."""
    own.rows[:] = 0
    own.regs[:] = 0
    own.reals[:] = 0.0


@called
def clear_pools(w):
    """Empty, and nothing on its way."""
    for pool in range(w["n_pools"]):
        room = pools(w)[pool]
        room["used"], room["open"], room["scope"] = 0, 0, NEVER_LEFT
    w["disturbed"], w["protected_now"], w["done_now"], w["in_side"] = 0, 0, 0, 0
    w["stamps"], w["arrivals"], w["staged"] = 0, 0, NONE


@called
def clear_order(w):
    """Nobody may leave."""
    w["layers_marked"] = 0
    for y in range(w["n_copies"]):
        owned(w)[y]["leaf"] = 0
    for layer in range(w["layers"]):
        layer_key(w)[layer], layer_order(w)[layer], layer_marked(w)[layer] = NO_KEY, NO_KEY, 0
        member_count(w)[layer], leaf_count(w)[layer], keyed_pass(w)[layer] = 0, 0, NEVER_LEFT
        keyed_scope(w)[layer] = 0 if w["rekey"] == TOUCH else NEVER_LEFT
    for node in range(w["n_queued"]):
        behind(w)[node], in_front(w)[node] = node, node


@called
def count_unused(w):
    """What was prefetched and is still unused."""
    for y in range(w["n_copies"]):
        if copies(w)[y]["state"] == RESIDENT and copies(w)[y]["prefetched"] == 1:
            count(w, BYTES_UNUSED_AT_END, layer_of(w, y), copies(w)[y]["bytes"])
