"""The fast path: most replays, one step at a time, without an event loop.

With one precision, every miss fetched, no listeners and no log, only the links work while compute does. A step is then:
transfers that land before the gate, the gate, and the experts one after the other, with transfers that land meanwhile.
All but this loop is the general kernel's code, compiled with these options as constants: with one link and no cost
beyond a table (`layout.FROZEN`), or with what `layout.LOOKED_UP` names.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import IN_FLIGHT, RESIDENT
from moereplay.simulator.compiled.cache import (
    GRANTED,
    enter,
    forget_all_done,
    join_pool,
    keep_for_good,
    mark_computed,
    reason,
    reserve,
    unpin_demanded,
    use_without_events,
)
from moereplay.simulator.compiled.clock import NEVER_DUE, STEP, advance, is_over, send
from moereplay.simulator.compiled.compute import (
    begin_gate,
    begin_step,
    expect,
    has_arrived,
    move_on,
    spend,
    stalled,
    take_arrived,
)
from moereplay.simulator.compiled.counters import (
    ACCESSES,
    BYTES_DEMAND,
    DENSE_NS,
    EXPERT_NS,
    HITS,
    LATE,
    LINK_BUSY_NS,
    MISSES,
    STALL_NS,
    WIDTH,
    close_row,
    count_here,
    count_step,
)
from moereplay.simulator.compiled.demand import (
    begin_demand,
    count_assignments,
    count_tokens,
    count_unchanged,
    recall,
    route,
)
from moereplay.simulator.compiled.gate import cancel_overtaken, count_prefetch_hit, serve_by, set_absent
from moereplay.simulator.compiled.initial import SimulationState
from moereplay.simulator.compiled.layout import SETTING, is_priced
from moereplay.simulator.compiled.link import (
    await_transfer,
    close_links,
    demand_waits,
    has_room,
    place,
    set_landing,
    start_again,
    take_landed,
)
from moereplay.simulator.compiled.links import (
    complete,
    count_predicted,
    expert_cost,
    fetch,
    lasting,
    next_landing,
    start_transfers,
    suggest,
)
from moereplay.simulator.compiled.passes import count_unused
from moereplay.simulator.compiled.ranking import clear_needed, mark_needed, update_next_use
from moereplay.simulator.compiled.state import NO_ERROR, STUCK, fail, layer_of, pool_of, size_of, taken_by
from moereplay.simulator.config import KINDS
from moereplay.simulator.interface import RunSpec
from moereplay.simulator.jit.marks import called, fast, load_ahead

# The course of a run, from which its times on another platform follow where decisions depend on time.
#
# Times decide one thing on the fast path: how many transfers have landed whenever a gate opens or compute ends
# something. So a run notes its course: the starts and landings of transfers, and what compute runs, in their order.
# `follow` repeats the course with the times of another platform, without cache and policies. It stops where a
# transfer would land earlier or later in this order: decisions may then differ.
#
# A step is noted as: starts; landings until the gate; the gate; starts; then the mark of each expert, or of each wait
# for a transfer, with the landings meanwhile and the starts thereafter; and the end of the step.

#: Marks: an expert by its number of tokens; a landing; a wait for landings; a gate; the end of a step; starts below.
LANDS, WAITS, GATE, ENDS, STARTS = -1, -2, -3, -4, -9
#: Starts: at the landing that makes them possible, or after what compute has begun or ended.
AT_ONCE, AFTERWARDS = 0, 1


@fast
def mark_of(layer, when):
    """Return the mark of the start of a transfer of a layer's expert."""
    return when - 2 * (layer + 5)


@fast
def layer_started(mark):
    """Return the layer of a start."""
    return -(mark >> 1) - 5


# what a run notes


@fast
def note_mark(s, mark):
    """Note a mark, if there is room; without room for all of them the course is useless."""
    if s["n_course"] > 0:
        if s["course"]["end"] < s["n_course"]:
            s.course[s["course"]["end"]] = mark
        s["course"]["end"] += 1


@fast
def note_starts(s, when):
    """Note the transfers that have started since the last call."""
    if s["n_course"] > 0:
        for at in range(s["course"]["started"], s["links"][0]["flight_end"]):
            note_mark(s, mark_of(layer_of(s, s.flight[place(s, 0, at)]), when))
        s["course"]["started"] = s["links"][0]["flight_end"]


# another platform


class NoHooks(NamedTuple):
    """Pointers to the hooks that `follow` calls: none."""


def follow(s: Any, hooks: Any) -> None:
    """Compute the times of a run's notes on the platform of a state, or set `course.differs`; there are no hooks."""
    begin_step(s)
    while not is_over(s) and goes_on(s):
        if s["n_noted"] > 0:
            advance(s, s["clock"]["compute_at"])
            begin_gate(s)
            repeat_step(s)
        else:
            repeat_starts(s, AFTERWARDS)
            repeat_landings(s, s["clock"]["compute_at"])
            expect_mark(s, GATE)
            begin_gate(s)
            repeat_starts(s, AFTERWARDS)
            repeat_experts(s)
        count_here(s, EXPERT_NS, s["compute"]["spent"])
        count_here(s, STALL_NS, stalled(s))
        move_on(s)
        begin_step(s)
    close_links(s)
    repeat_landings(s, s["clock"]["time"])
    close_row(s)


@fast
def goes_on(s):
    return s["course"]["differs"] == 0 and s["errors"]["error"] == NO_ERROR


@fast
def next_mark(s):
    """Return the next mark of the course; after the last there is none."""
    return s.course[s["course"]["end"]] if s["course"]["end"] < s["n_course"] else ENDS


@fast
def pass_mark(s):
    s["course"]["end"] += 1


@fast
def expect_mark(s, mark):
    """Pass the next mark, which must be this one."""
    if next_mark(s) != mark:
        s["course"]["differs"] = 1
    pass_mark(s)


@called
def repeat_landings(s, until):
    """Advance to `until`, with the landings of the course on the way; there must be no others."""
    while next_mark(s) == LANDS and next_landing(s) <= until:
        advance(s, next_landing(s))
        take_landed(s, 0)
        pass_mark(s)
        repeat_starts(s, AT_ONCE)
    if next_mark(s) == LANDS or next_landing(s) <= until:
        s["course"]["differs"] = 1
    advance(s, until)


@called
def repeat_starts(s, when):
    """Start the transfers of the course that start here."""
    while next_mark(s) <= STARTS and next_mark(s) & 1 == when:
        start_again(s, layer_started(next_mark(s)) * s["experts"])
        pass_mark(s)


@fast
def repeat_experts(s):
    """Run the experts of a step, and wait for transfers, as in the course."""
    while next_mark(s) != ENDS and goes_on(s):
        if next_mark(s) == WAITS:
            pass_mark(s)
            repeat_landings(s, next_landing(s))
        else:
            spent = expert_cost(s, s.now["layer"] * s["experts"], next_mark(s))
            pass_mark(s)
            spend(s, spent)
            repeat_landings(s, s["clock"]["time"] + spent)
            repeat_starts(s, AFTERWARDS)
    expect_mark(s, ENDS)


class FastHooks(NamedTuple):
    """Pointers to the hooks that the fast path calls."""

    choose: Any
    suggest: Any
    key: Any


@called
def fast_path(s: Any, hooks: Any) -> None:
    """Run all steps, then land the transfers of the last nanosecond, but none that is issued in it.

    `layout.is_fast` must be true of the state; `hooks` are FastHooks.
    """
    if s["n_resident"] > 0:
        keep_for_good(s)
    begin_step(s)
    while not is_over(s) and s["errors"]["error"] == NO_ERROR:
        start_more(s, hooks)
        run_link(s, hooks, s["clock"]["compute_at"])
        if s["arrives"] == 1 and s["compute"]["program_counter"] == STEP:  # the request that compute waited for is here
            begin_step(s)
            continue
        note_mark(s, GATE)
        begin_gate(s)
        begin_fast_demand(s, hooks)
        mark_demand(s)
        if is_alone(s):
            run_alone(s, hooks)
        else:
            hits = look_up_demand(s, hooks)
            start_more(s, hooks)
            compute(s, hooks, hits)
        end_fast_step(s, hooks)
        begin_step(s)
    close_links(s)
    run_link(s, hooks, s["clock"]["time"])
    count_unused(s)
    close_row(s)


def priced_path(s: Any, hooks: Any) -> None:
    """Do what `fast_path` does where `layout.is_priced` is true of the state."""
    fast_path(s, hooks)


# the link


@fast
def run_link(s, hooks, until):
    """Advance to `until`, landing transfers on the way."""
    lands = next_landing(s)
    if lands <= until:
        catch_up(s, hooks, lands, until)
    advance(s, until)


@called
def catch_up(s, hooks, lands, until):
    """Land transfers one by one, the first at `lands`, and start those that each makes possible."""
    while lands <= until:
        advance(s, lands)
        complete(s, hooks)
        start_transfers(s, hooks)
        note_mark(s, LANDS)
        note_starts(s, AT_ONCE)
        lands = next_landing(s)


@called
def start_more(s, hooks):
    """Start transfers after an event other than a landing."""
    start_transfers(s, hooks)
    note_starts(s, AFTERWARDS)


# the gate


@fast
def look_up_demand(s, hooks):
    """Classify and use each demanded expert in demand order; return the number of hits."""
    cancel_overtaken(s)
    count_predicted(s)
    hits, late, misses, base = 0, 0, 0, s.now["layer"] * s["experts"]
    for n in range(s["demand"]["demanded"]):
        x = s.demand_expert[n]
        state = s.copies[x]["state"]
        if state == RESIDENT:
            s.present[hits] = n
            hits += 1
            count_prefetch_hit(s, x)
        elif state == IN_FLIGHT:
            late += 1
            serve_by(s, x - base, n)
            await_transfer(s, x)
        else:
            misses += 1
            serve_by(s, x - base, n)
            count_here(s, reason(s, x, 0), 1)
            fetch(s, x)
        use_without_events(s, x)
    expect(s, late + misses)
    count_look_up(s, hits, late, misses)
    if s["n_noted"] > 0:
        s["notes"]["crowded"] = 1
    if s["has_suggest"] == 1 and s["after_demand"] == 0:
        suggest(s, hooks)
    return hits


@fast
def begin_fast_demand(s, hooks):
    """Route the tokens; without a routing policy load rows that the next step needs."""
    if s["has_choose"] == 1 or s["arrives"] == 1:
        route(s, hooks)
        return
    begin_demand(s)
    load_next(s, recall(s) + s["demand"]["demanded"])


@fast
def load_next(s, at):
    """Load the rows of as many experts of the next step as this one demands; `at`: their position in the stream."""
    base = (s.now["layer"] + 1) * s["experts"] if s.now["layer"] + 1 < s["layers"] else 0
    stop = min(at + s["demand"]["demanded"], s["n_demand"])
    for i in range(at, stop):
        load_ahead(s.copies[base + s.stream_expert[i]])
    if s["ranks"] == 1:
        for i in range(at, stop):
            load_ahead(s.owned[base + s.stream_expert[i]])
    if s["keeps_uses"] == 1:
        for i in range(at, stop):
            load_ahead(s.experts[base + s.stream_expert[i]])


@fast
def mark_demand(s):
    """Update the tables of demanded experts, as far as a policy reads them."""
    if s["reads_need"] == 1:
        for n in range(s["demand"]["demanded"]):
            mark_needed(s, s.demand_expert[n], s.demand_sum[n])
    if s["knows_future"] == 1:
        for n in range(s["demand"]["demanded"]):
            update_next_use(s, s.demand_expert[n], n)


@fast
def count_look_up(s, hits, late, misses):
    """Count the outcomes of a gate."""
    set_absent(s, misses)
    count_here(s, ACCESSES, s["demand"]["demanded"])
    count_assignments(s)
    count_here(s, HITS, hits)
    count_here(s, LATE, late)
    count_here(s, MISSES, misses)
    count_step(s, misses)


@called
def note_decisions(s, hits, misses):
    """Note the outcomes of a gate; if the pass has several tokens also those of each access, hits first."""
    step, end = s.now["step"], s["notes"]["end"]
    s.noted_hits[step], s.noted_misses[step] = hits, misses
    if s.now["tokens"] > 1:
        for i in range(hits + misses):
            s.noted_tokens[end + i] = tokens_of(s, i, hits, 0)
        s["notes"]["end"] = end + hits + misses


# a step that is alone on its link: it needs neither queues nor events


@fast
def is_alone(s):
    """Return whether no transfer but this step's own crosses the link until it ends, and its demand fits its pool.

    All that it demands has then landed when it ends, and no decision depends on when.
    """
    if s["has_suggest"] == 1 or s["n_course"] > 0 or not has_plain_link(s):
        return False
    first = s.now["layer"] * s["experts"]
    return s["demand"]["demanded"] * taken_by(s, first) <= s.pools[pool_of(s, first)]["capacity"]


@fast
def has_plain_link(s):
    """Return whether transfers cross one link whose times depend on nothing but their bytes, and return at once."""
    if s["n_links"] > 1 or s["n_tiers"] > 0:
        return False
    return s["has_pieces"] == 0 and s["slows_compute"] == 0 and s["victim_ns"] == 0


@fast
def run_alone(s, hooks):
    """Look up the demand, bring the misses in, and run all experts."""
    hits, misses = 0, 0
    for n in range(s["demand"]["demanded"]):
        x = s.demand_expert[n]
        if s.copies[x]["state"] == RESIDENT:
            s.present[hits] = n
            hits += 1
        else:
            s.absent[misses] = n
            misses += 1
            count_here(s, reason(s, x, 0), 1)
        use_without_events(s, x)
    count_look_up(s, hits, 0, misses)
    gate = s["clock"]["time"]
    for m in range(misses):
        begin_transfer(s, m)
        bring_in(s, hooks, s.demand_expert[s.absent[m]], m)
    count_here(s, BYTES_DEMAND, misses * size_of(s, s.now["layer"] * s["experts"]))
    run_all(s, gate, hits, misses, 0)
    if s["n_noted"] > 0:
        note_decisions(s, hits, misses)
    if s["reads_need"] == 1:
        for n in range(s["demand"]["demanded"]):
            clear_needed(s, s.demand_expert[n])


@fast
def begin_transfer(s, m):
    """Advance to when the m-th transfer of the step starts: at the gate, or when the link has a free slot."""
    depth = s["links"][0]["depth"]
    if m >= depth:
        advance(s, s.lands[m - depth])


@fast
def bring_in(s, hooks, x, m):
    """Transfer a missed expert, the m-th of the step, and make it resident at once."""
    if reserve(s, hooks, x, 0) != GRANTED:
        fail(s, STUCK, 0)
    set_landing(s, 0, m, send(s, 0, x, s["counters"]["page"]))
    enter(s, x, 0)
    join_pool(s, x)


@fast
def run_all(s, gate, hits, misses, noted):
    """Run the hits from the gate on, then each miss when it has landed. `noted`: 1 if notes have the tokens of each."""
    each, x, spent = cost_of_each(s), s.now["layer"] * s["experts"], 0
    for i in range(hits):
        spent += each if each != VARIES else expert_cost(s, x, tokens_of(s, i, hits, noted))
    time = gate + spent
    for m in range(misses):
        cost = each if each != VARIES else expert_cost(s, x, tokens_of(s, hits + m, hits, noted))
        time = max(time, s.lands[m]) + cost
        spent += cost
    spend(s, spent)
    advance(s, time)


@fast
def tokens_of(s, i, hits, noted):
    """Return the tokens of the i-th access of a step, the hits first."""
    if noted == 1:
        return np.int64(s.noted_tokens[s["notes"]["end"] + i])
    return s.demand_tokens[s.present[i] if i < hits else s.absent[i - hits]]


@fast
def repeat_step(s):
    """Take the time of a step whose outcomes are noted: `run_alone` without cache and policies."""
    hits, misses = np.int64(s.noted_hits[s.now["step"]]), np.int64(s.noted_misses[s.now["step"]])
    gate, x = s["clock"]["time"], s.now["layer"] * s["experts"]
    for m in range(misses):
        begin_transfer(s, m)
        set_landing(s, 0, m, send(s, 0, x, s["counters"]["page"]))
    run_all(s, gate, hits, misses, 1)
    if s.now["tokens"] > 1:
        s["notes"]["end"] += hits + misses


# compute

VARIES = -1


@fast
def cost_of_each(s):
    """Return what every expert of the step takes, ns, or VARIES: it depends on its tokens, or on what the links do."""
    if s.now["tokens"] > 1 or s["slows_compute"] == 1:
        return VARIES
    return expert_cost(s, s.now["layer"] * s["experts"], 1)


@fast
def compute(s, hooks, hits):
    """Run the hits in demand order, then the other experts as they arrive."""
    each, base = cost_of_each(s), s.now["layer"] * s["experts"]
    for i in range(hits):
        run(s, hooks, s.demand_expert[s.present[i]], s.demand_tokens[s.present[i]], each)
    while s["compute"]["coming"] > 0:
        if has_arrived(s):
            x = take_arrived(s)
            tokens = s.demand_tokens[s.slot[x - base]] if each == VARIES else 1
            run(s, hooks, x, tokens, each)
        elif next_landing(s) == NEVER_DUE:
            if s["errors"]["error"] == NO_ERROR:
                fail(s, STUCK, 0)
            return
        else:
            note_mark(s, WAITS)
            run_link(s, hooks, next_landing(s))


@fast
def run(s, hooks, x, tokens, each):
    """Run one expert over its tokens, then start a demand that was waiting for space."""
    note_mark(s, tokens)
    spent = each if each != VARIES else expert_cost(s, x, tokens)
    spend(s, spent)
    run_link(s, hooks, s["clock"]["time"] + lasting(s, x, spent))
    mark_computed(s, x, x)
    for link in range(s["n_links"]):
        if demand_waits(s, link) and has_room(s, link):
            start_more(s, hooks)
            break


@fast
def end_fast_step(s, hooks):
    """End the step, in the event that ended its last activity."""
    if s["after_demand"] == 1 and s["has_suggest"] == 1:
        suggest(s, hooks)
    count_here(s, EXPERT_NS, s["compute"]["spent"])
    count_here(s, STALL_NS, stalled(s))
    if s["demand"]["changed"] == 1:
        count_tokens(s, s.now["layer"])  # routed tokens run as weighed: no miss changes them
    else:
        count_unchanged(s, s.now["layer"])
    unpin_demanded(s)
    forget_all_done(s)
    note_mark(s, ENDS)
    move_on(s)


# What a run notes for replays on other platforms: its course, or what each step hits and misses.

RESULTS = ("cells", "lifetimes", "rows", "layer_rows")
#: Columns of the counters that do not depend on a platform's times.
COUNTED = [column for column in range(WIDTH) if column not in (DENSE_NS, EXPERT_NS, LINK_BUSY_NS, STALL_NS)]


def key_of(spec: RunSpec) -> Hashable:
    """Return what the decisions of a replay of a trace follow from: everything but the platform's times."""
    geometry, config = spec.layout.geometry, spec.config.model_copy(update={"platform": ""})
    sizes = (spec.layout.tiers, geometry.layers, geometry.experts, geometry.k, geometry.router)
    chosen = spec.chosen.priced(spec.times)
    policies = tuple((of.policy.label, *of.par()) for of in (getattr(chosen, kind) for kind in KINDS))
    return config, sizes, spec.pools, spec.resident, spec.by_layer, policies


class Noted:
    """The notes and the results of a finished run."""

    def __init__(self, state: SimulationState) -> None:
        """`state` is that at the end of a run with notes."""
        self._results = {name: state.arrays[name] for name in RESULTS}
        self._fixed, course, end = _fixed(state), state.arrays["course"], int(state["course"]["end"])
        tokens = state.arrays["noted_tokens"][: int(state["notes"]["end"])]
        steps = {name: state.arrays[name] for name in ("noted_hits", "noted_misses")}
        #: the arrays that `follow` reads
        self.arrays = {"course": course[:end]} if len(course) else steps | {"noted_tokens": tokens}
        #: whether there was room for the whole course, or for the demand of every step in its pool
        self.holds = end <= len(course) and not state["notes"]["crowded"]

    def fits(self, state: SimulationState) -> bool:
        """Return whether `follow` can take the notes to the end of a state that has not begun."""
        return state.is_fast and not is_priced(state) and _fixed(state) == self._fixed

    def complete(self, state: SimulationState) -> bool:
        """Add all but the times to the results of a state that `follow` has ended; return False if it could not."""
        if state["course"]["differs"] or state["errors"]["error"] != NO_ERROR:
            return False
        for name in ("lifetimes", "layer_rows"):
            state.arrays[name][:] = self._results[name]
        for name in ("cells", "rows"):
            mine, known = (each.reshape(-1, WIDTH) for each in (state.arrays[name], self._results[name]))
            mine[:, COUNTED] = known[:, COUNTED]
        return True


def _fixed(state: SimulationState) -> list[int]:
    """Return the numbers of a state on which the order of events depends, for a course."""
    if not state["n_course"]:
        return []
    return [*(int(state[name]) for name in SETTING.split()), int(state["links"][0]["depth"])]
