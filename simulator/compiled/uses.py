"""The expert table: demand, uses, predictions and their logical timestamps, and the next use."""

from __future__ import annotations

from moereplay.simulator.compiled import listeners
from moereplay.simulator.compiled.queues import BY_LAST_USE, move_last
from moereplay.simulator.compiled.ranking import invalidate_expert
from moereplay.simulator.compiled.state import demand_next, demand_pass, expert_of, experts, now
from moereplay.simulator.jit.marks import called, fast

on_predict = listeners.notifier("on_predict")


@fast
def need(s, x, mass):
    """Expert x is demanded, with so much gate weight."""
    if s["reads_need"] == 1:
        experts(s)[x]["needed"] = 1
        experts(s)[x]["mass_ever"] += mass


@fast
def need_no_more(s, x):
    """Expert x has run, or does not run from here."""
    if s["reads_need"] == 1:
        experts(s)[x]["needed"] = 0
    if s["keys_read_demand"] == 1:
        invalidate_expert(s, x)


@fast
def foresee(s, x, n):
    """The next use of expert x, the n-th demanded of this step."""
    experts(s)[x]["next_use"] = demand_next(s)[n]
    if s["reads_passes"] == 1:
        experts(s)[x]["next_pass"] = demand_pass(s)[n]


@fast
def set_timestamp(s, x):
    """A use, or the arrival of a prefetch: the next logical timestamp."""
    s["uses"]["timestamps"] += 1
    experts(s)[x]["last_use"] = s["uses"]["timestamps"]
    experts(s)[x]["last_pass"] = now(s)["pass"]
    if s["queue"] == BY_LAST_USE:
        move_last(s, x)


@fast
def count_use(s, x, counted):
    """A use of expert x. `counted`: 1 if the arrival of what runs counted as its first use here."""
    set_timestamp(s, x)
    expert = experts(s)[x]
    expert["uses_ever"] += 1
    expert["uses_here"] = max(1, expert["uses_here"] + 1 - counted)


@fast
def count_first_use(s, x):
    """The arrival of a prefetch counts as the first use here of expert x."""
    experts(s)[x]["uses_here"] = 1


@fast
def forget_uses(s, x):
    """Expert x has no copy any more: its uses here are forgotten."""
    experts(s)[x]["uses_here"] = 0


@fast
def predict(s, hooks, y):
    """A prefetch policy predicted a resident copy: the next logical timestamp."""
    x = expert_of(s, y)
    s["uses"]["timestamps"] += 1
    experts(s)[x]["last_prediction"], experts(s)[x]["prediction_pass"] = s["uses"]["timestamps"], now(s)["pass"]
    if s["keys_read_predictions"] == 1:
        invalidate_expert(s, x)
    if s["listeners_on_predict"] != 0:
        on_predict(s, hooks, y)


@called
def clear_uses(s):
    """As if nothing had ever been used; oracle information stays."""
    s["uses"]["timestamps"] = 0
    for x in range(s["n_experts"]):
        clear_expert(experts(s)[x])


@called
def clear_expert(row):
    """As at the start, but for its future."""
    row["last_pass"], row["prediction_pass"], row["last_prediction"] = -1, -1, 0
    row["last_use"], row["uses_ever"], row["uses_here"], row["mass_ever"], row["needed"] = 0, 0, 0, 0, 0
