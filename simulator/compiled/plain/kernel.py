"""Most replays, told without a loop over events.

Where experts have one precision, every miss is fetched, policies answer but do not listen, and nobody asks for the log,
only the link works beside compute. A step is then told straight through: what landed until its gate, the gate, one
expert after the other with what landed meanwhile. The results are those of `kernel`, to the nanosecond, for a fraction
of the instructions; `is_plain` says where.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from policies.contract import NONE
from simulator.compiled import counters
from simulator.compiled.cache import computed
from simulator.compiled.compute import OVER, begin_step, move_on
from simulator.compiled.counters import close_row, count_here
from simulator.compiled.fidelity import count_tokens, count_unchanged
from simulator.compiled.link import next_landing
from simulator.compiled.plain.gate import open_gate, suggest
from simulator.compiled.plain.link import land, run_link, start_more
from simulator.compiled.plain.queue import NO_QUEUE
from simulator.compiled.reset import count_unused
from simulator.compiled.runtime.jit import fast
from simulator.compiled.runtime.ranking import disturb, touch
from simulator.compiled.runtime.state import (
    NO_ERROR,
    NOT_SOON,
    STUCK,
    copies,
    cost_row,
    demand_expert,
    demand_tokens,
    done,
    expert_ns,
    experts,
    found,
    now,
    owned,
    pools,
    ready,
    slot,
)

#: Numbers of a world that are 0 in a plain one, and those that are 1.
ABSENT = (
    *("sequential", "side_slots", "logs", "keeps", "n_warm", "has_want", "has_resolve", "has_substitute", "has_admit"),
    *("hears_gate", "hears_use", "hears_insert", "hears_evict", "hears_predict"),
)
PRESENT = ("precisions", "by_key")


def is_plain(world: Any) -> bool:
    """Whether `plain` may replay it."""
    return all(world[name] == 0 for name in ABSENT) and all(world[name] == 1 for name in PRESENT)


class Hooks(NamedTuple):
    """The policies' hooks that there may be in such a world."""

    choose: Any
    suggest: Any
    keys: Any


def plain(w: Any, choose: Any, suggest: Any, keys: Any) -> None:
    """Replay a world of which `is_plain` is true."""
    hooks = Hooks(choose, suggest, keys)
    begin_step(w)
    while w["place"] != OVER and w["error"] == NO_ERROR:
        start_more(w, hooks)
        run_link(w, hooks, w["compute_at"])
        open_gate(w, hooks)
        start_more(w, hooks)
        compute(w, hooks)
        finish_step(w, hooks)
        begin_step(w)
    land_the_last(w, hooks)
    count_unused(w)
    close_row(w)


# compute


@fast
def compute(w, hooks):
    """The hits in demand order, then the others as they come."""
    for i in range(w["in_place"]):
        run(w, hooks, demand_expert(w)[found(w)[i]], demand_tokens(w)[found(w)[i]])
    while w["coming"] > 0 and w["error"] == NO_ERROR:
        if w["ready_first"] == w["ready_end"]:
            wait(w, hooks)
        else:
            x = ready(w)[w["ready_first"] & (w["n_ring"] - 1)]
            e = x - now(w)["layer"] * w["experts"]
            n, slot(w)[e] = slot(w)[e], NONE
            w["ready_first"] += 1
            w["coming"] -= 1
            run(w, hooks, x, demand_tokens(w)[n])


@fast
def wait(w, hooks):
    """Until something lands."""
    if next_landing(w) == NOT_SOON:
        w["error"] = STUCK
    else:
        run_link(w, hooks, next_landing(w))


@fast
def run(w, hooks, x, tokens):
    """One expert over its tokens."""
    spent = expert_ns(w)[cost_row(w)[now(w)["layer"]], tokens]
    w["spent"] += spent
    run_link(w, hooks, w["time"] + spent)
    experts(w)[x]["needed"] = 0
    if w["minds_demand"] == 1:
        touch(w, x)
    computed(w, x)
    if w["demand_first"] < w["demand_end"] and w["flight_end"] - w["flight_first"] < w["depth"]:  # for want of room
        start_more(w, hooks)


# the step's end


@fast
def finish_step(w, hooks):
    """In the event that ended its last activity."""
    if w["after_demand"] == 1 and w["has_suggest"] == 1:
        suggest(w, hooks.suggest)
    count_here(w, counters.EXPERT_NS, w["spent"])
    count_here(w, counters.STALL_NS, w["time"] - w["gated_at"] - w["spent"])
    if w["changed"] == 1:
        count_tokens(w, now(w)["layer"])  # what routing weighed is what runs
    else:
        count_unchanged(w, now(w)["layer"])
    release_all(w)
    move_on(w)


@fast
def release_all(w):
    """Nothing is protected between a step's start and its gate."""
    for n in range(w["demanded"]):
        x = demand_expert(w)[n]
        if copies(w)[x]["protected"] == 1:
            copies(w)[x]["protected"] = 0
            if owned(w)[x]["member"] == 1:
                pools(w)[copies(w)[x]["pool"]]["open"] += copies(w)[x]["bytes"]
                if w["queue"] == NO_QUEUE:
                    disturb(w, x)
    for i in range(w["done_now"]):
        owned(w)[done(w)[i]]["done"] = 0
    w["done_now"] = 0


@fast
def land_the_last(w, hooks):
    """The end: what lands in this very nanosecond still does, but for what is issued now."""
    abandoned = w["flight_end"]
    while w["flight_first"] < abandoned and next_landing(w) <= w["time"]:
        land(w)
        start_more(w, hooks)
