"""The course of a run, from which its times on another platform follow where decisions depend on time.

Times decide one thing on the fast path: how many transfers have landed whenever a gate opens or compute ends something.
So a run notes its course: the starts and landings of transfers, and what compute runs, in their order. `follow` repeats
the course with the times of another platform, without cache and policies. It stops where a transfer would land earlier
or later in this order: decisions may then differ.

A step is noted as: starts; landings until the gate; the gate; starts; then the mark of each expert, or of each wait for
a transfer, with the landings meanwhile and the starts thereafter; and the end of the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moereplay.simulator.compiled.clock import advance
from moereplay.simulator.compiled.compute import begin_gate, begin_step, move_on, stalled
from moereplay.simulator.compiled.costs import expert_cost
from moereplay.simulator.compiled.counters import EXPERT_NS, STALL_NS, close_row, count_here
from moereplay.simulator.compiled.link import close_links, place, start_again, take_landed
from moereplay.simulator.compiled.links import next_landing
from moereplay.simulator.compiled.program import is_over, spend
from moereplay.simulator.compiled.state import NO_ERROR, layer_of
from moereplay.simulator.jit.marks import called, fast

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
        put(s, mark)


@fast
def put(s, mark):
    if s["course"]["end"] < s["n_course"]:
        s.course[s["course"]["end"]] = mark
    s["course"]["end"] += 1


@fast
def note_starts(s, when):
    """Note the transfers that have started since the last call."""
    if s["n_course"] > 0:
        for at in range(s["course"]["started"], s["links"][0]["flight_end"]):
            put(s, mark_of(layer_of(s, s.flight[place(s, 0, at)]), when))
        s["course"]["started"] = s["links"][0]["flight_end"]


# another platform


class NoHooks(NamedTuple):
    """Pointers to the hooks that `follow` calls: none."""


def follow(s: Any, hooks: Any) -> None:
    """Compute the times of a course on the platform of a state, or set `course.differs`; there are no hooks."""
    follow_course(s)


@fast
def follow_course(s):
    """Follow all steps, and land the transfers of the last nanosecond."""
    begin_step(s)
    while not is_over(s) and goes_on(s):
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
