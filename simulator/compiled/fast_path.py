"""The fast path: most replays, one step at a time, without an event loop.

With one precision, every miss fetched, no listeners and no log, only the links work while compute does. A step is then:
transfers that land before the gate, the gate, and the experts one after the other, with transfers that land meanwhile.
All but this loop is the general kernel's code, compiled with these options as constants: with one link and no cost
beyond a table (`variants.FROZEN`), or with what `variants.LOOKED_UP` names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moereplay.policies.contract import IN_FLIGHT, RESIDENT
from moereplay.simulator.compiled.cache import keep_for_good, mark_computed, reason, unpin_demanded, use_without_events
from moereplay.simulator.compiled.clock import NEVER_DUE, advance
from moereplay.simulator.compiled.compute import (
    begin_gate,
    begin_step,
    expect,
    has_arrived,
    move_on,
    stalled,
    take_arrived,
)
from moereplay.simulator.compiled.costs import expert_cost, lasting
from moereplay.simulator.compiled.counters import (
    ACCESSES,
    EXPERT_NS,
    HITS,
    LATE,
    MISSES,
    STALL_NS,
    close_row,
    count_here,
)
from moereplay.simulator.compiled.course import AFTERWARDS, AT_ONCE, ENDS, GATE, LANDS, WAITS, note_mark, note_starts
from moereplay.simulator.compiled.demand import begin_demand, begin_recall, recall_one, route
from moereplay.simulator.compiled.gate import (
    cancel_overtaken,
    count_prefetch_hit,
    mark_open,
    serve_by,
    set_absent,
)
from moereplay.simulator.compiled.link import await_transfer, close_links, demand_may_start
from moereplay.simulator.compiled.links import complete, fetch, next_landing, start_transfers
from moereplay.simulator.compiled.predictions import count_predicted, suggest
from moereplay.simulator.compiled.program import is_idle, is_over, spend
from moereplay.simulator.compiled.reset import count_unused
from moereplay.simulator.compiled.state import (
    NO_ERROR,
    STUCK,
    fail,
)
from moereplay.simulator.compiled.uses import mark_needed, update_next_use
from moereplay.simulator.compiled.weights import count_assignments, count_tokens, count_unchanged
from moereplay.simulator.jit.marks import called, fast, load_ahead


class FastHooks(NamedTuple):
    """Pointers to the hooks that the fast path calls."""

    choose: Any
    suggest: Any
    key: Any


def fast_path(s: Any, hooks: Any) -> None:
    """Replay to the end. `variants.is_fast` must be true of the state, and not `batched`; `hooks` are FastHooks."""
    replay_steps(s, hooks)


def batch_path(s: Any, hooks: Any) -> None:
    """Do what `fast_path` does where passes have rows of several requests, or drafts: where the state is `batched`."""
    replay_steps(s, hooks)


def priced_path(s: Any, hooks: Any) -> None:
    """Do what `fast_path` does where `variants.is_priced` is true of the state."""
    replay_steps(s, hooks)


@fast
def replay_steps(s, hooks):
    """Run all steps, then land the transfers of the last nanosecond, but none that is issued in it."""
    if s["n_resident"] > 0:
        keep_for_good(s)
    begin_step(s)
    while not is_over(s) and s["errors"]["error"] == NO_ERROR:
        start_more(s, hooks)
        run_link(s, hooks, s["clock"]["compute_at"])
        if s["arrives"] == 1 and is_idle(s):
            begin_step(s)
            continue
        note_mark(s, GATE)
        hits = look_up_demand(s, hooks)
        start_more(s, hooks)
        compute(s, hooks, hits)
        end_fast_step(s, hooks)
        begin_step(s)
    close_links(s)
    run_link(s, hooks, s["clock"]["time"])
    count_unused(s)
    close_row(s)


# the link


@fast
def run_link(s, hooks, until):
    """Advance to `until`, landing transfers on the way."""
    if next_landing(s) <= until:
        catch_up(s, hooks, until)
    advance(s, until)


@called
def catch_up(s, hooks, until):
    """Land transfers one by one and start those that each makes possible."""
    while next_landing(s) <= until:
        advance(s, next_landing(s))
        complete(s, hooks)
        start_transfers(s, hooks)
        note_mark(s, LANDS)
        note_starts(s, AT_ONCE)


@called
def start_more(s, hooks):
    """Start transfers after an event other than a landing."""
    start_transfers(s, hooks)
    note_starts(s, AFTERWARDS)


# the gate


@fast
def look_up_demand(s, hooks):
    """Open the gate: classify and use each demanded expert in demand order; return the number of hits."""
    begin_gate(s)
    mark_open(s)
    first = begin_fast_demand(s, hooks)
    cancel_overtaken(s)
    hits, late, misses = 0, 0, 0
    for n in range(s["demand"]["demanded"]):
        x = take_demanded(s, n, first + n)
        state = s.copies[x]["state"]
        if state == RESIDENT:
            s.present[hits] = n
            hits += 1
            count_prefetch_hit(s, x)
        elif state == IN_FLIGHT:
            late += 1
            serve_by(s, x, n)
            await_transfer(s, x)
        else:
            misses += 1
            serve_by(s, x, n)
            count_here(s, reason(s, x, 0), 1)
            fetch(s, x)
        use_without_events(s, x)
    count_look_up(s, hits, late, misses)
    if s["n_noted"] > 0:
        note_decisions(s, hits, misses)
    if s["has_suggest"] == 1 and s["after_demand"] == 0:
        suggest(s, hooks)
    return hits


@fast
def begin_fast_demand(s, hooks):
    """Route the tokens; without a routing policy return the step's first position in the demand stream."""
    if s["has_choose"] == 1 or s["arrives"] == 1:
        route(s, hooks)
        return 0
    begin_demand(s)
    first = begin_recall(s)
    load_next(s, first + s["demand"]["demanded"])
    return first


@fast
def load_next(s, at):
    """Load the rows of as many experts of the next step as this one demands; `at`: their position in the stream."""
    base = (s.now["layer"] + 1) * s["experts"] if s.now["layer"] + 1 < s["layers"] else 0
    for i in range(at, min(at + s["demand"]["demanded"], s["n_demand"])):
        x = base + s.stream_expert[i]
        load_ahead(s.copies[x])
        load_ahead(s.owned[x])
        load_ahead(s.experts[x])


@fast
def take_demanded(s, n, at):
    """Return the n-th demanded expert and update its tables; `at`: its position in the demand stream."""
    if s["has_choose"] == 0 and s["arrives"] == 0:
        recall_one(s, n, at)
    x = s.demand_expert[n]
    mark_needed(s, x, s.demand_sum[n])
    if s["knows_future"] == 1:
        update_next_use(s, x, n)
    count_predicted(s, x)
    return x


@fast
def count_look_up(s, hits, late, misses):
    """Count the outcomes of a gate, and set how many experts compute waits for."""
    expect(s, late + misses)
    set_absent(s, misses)
    count_here(s, ACCESSES, s["demand"]["demanded"])
    count_assignments(s)
    count_here(s, HITS, hits)
    count_here(s, LATE, late)
    count_here(s, MISSES, misses)


@called
def note_decisions(s, hits, misses):
    """Note the outcomes of a gate; if the pass has several tokens also those of each access, hits first."""
    step = s.now["step"]
    s.noted_hits[step], s.noted_misses[step] = hits, misses
    if s.now["tokens"] == 1:
        return
    hit = s["notes"]["end"]
    miss, i = hit + hits, 0
    for n in range(hits + misses):
        if i < hits and s.present[i] == n:
            s.noted_tokens[hit + i] = s.demand_tokens[n]
            i += 1
        else:
            s.noted_tokens[miss] = s.demand_tokens[n]
            miss += 1
    s["notes"]["end"] = miss


# compute


@fast
def compute(s, hooks, hits):
    """Run the hits in demand order, then the other experts as they arrive."""
    for i in range(hits):
        run(s, hooks, s.demand_expert[s.present[i]], s.demand_tokens[s.present[i]])
    while s["compute"]["coming"] > 0 and s["errors"]["error"] == NO_ERROR:
        if has_arrived(s):
            x = take_arrived(s)
            run(s, hooks, x, s.demand_tokens[s.slot[x - s.now["layer"] * s["experts"]]])
        elif next_landing(s) == NEVER_DUE:
            fail(s, STUCK, 0)
        else:
            note_mark(s, WAITS)
            run_link(s, hooks, next_landing(s))


@fast
def run(s, hooks, x, tokens):
    """Run one expert over its tokens, then start a demand that was waiting for space."""
    note_mark(s, tokens)
    spent = expert_cost(s, x, tokens)
    spend(s, spent)
    run_link(s, hooks, s["clock"]["time"] + lasting(s, x, spent))
    mark_computed(s, x, x)
    if any_demand_may_start(s):
        start_more(s, hooks)


@fast
def any_demand_may_start(s):
    """Return whether a demand is queued on a link that has a free slot."""
    for link in range(s["n_links"]):
        if demand_may_start(s, link):
            return True
    return False


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
    note_mark(s, ENDS)
    move_on(s)
