"""The expert table: demand, uses, predictions with their logical timestamps, and next uses."""

from __future__ import annotations

from moereplay.simulator.compiled.ranking import BY_LAST_USE, invalidate_expert, move_last
from moereplay.simulator.compiled.state import expert_of, notifier
from moereplay.simulator.jit.marks import called, fast

on_predict = notifier("on_predict")


@fast
def mark_needed(s, x, mass):
    """Mark expert x as demanded, and add its gate weight."""
    if s["reads_need"] == 1:
        s.experts[x]["needed"] = 1
        s.experts[x]["mass_ever"] += mass


@fast
def clear_needed(s, x):
    """Clear the demand for expert x: it has run, or does not run from the fast tier."""
    if s["reads_need"] == 1:
        s.experts[x]["needed"] = 0
    if s["keys_read_demand"] == 1:
        invalidate_expert(s, x)


@fast
def update_next_use(s, x, n):
    """Update the next use of expert x, the n-th demanded of this step."""
    s.experts[x]["next_use"] = s.demand_next[n]
    if s["reads_passes"] == 1:
        s.experts[x]["next_pass"] = s.demand_pass[n]


@fast
def set_timestamp(s, x):
    """Set the next logical timestamp, at a use or the arrival of a prefetch."""
    s["uses"]["timestamps"] += 1
    s.experts[x]["last_use"] = s["uses"]["timestamps"]
    s.experts[x]["last_pass"] = s.now["pass"]
    if s["queue"] == BY_LAST_USE and (s["n_resident"] == 0 or s.owned[x]["for_good"] == 0):
        move_last(s, x)


@fast
def count_use(s, x, counted):
    """Count a use of expert x. `counted`: 1 if the arrival of its copy was already counted as a use."""
    set_timestamp(s, x)
    expert = s.experts[x]
    expert["uses_ever"] += 1
    expert["uses_here"] = max(1, expert["uses_here"] + 1 - counted)


@fast
def count_first_use(s, x):
    """Count the arrival of a prefetch as the first use of expert x since it became resident."""
    s.experts[x]["uses_here"] = 1


@fast
def forget_uses(s, x):
    """Clear the uses of expert x, which has no copy left."""
    s.experts[x]["uses_here"] = 0


@fast
def predict(s, hooks, y):
    """Record the prediction of a resident copy, with the next logical timestamp."""
    x = expert_of(s, y)
    s["uses"]["timestamps"] += 1
    s.experts[x]["last_prediction"], s.experts[x]["prediction_pass"] = s["uses"]["timestamps"], s.now["pass"]
    if s["keys_read_predictions"] == 1:
        invalidate_expert(s, x)
    if s["listeners_on_predict"] != 0:
        on_predict(s, hooks, y)


@called
def clear_uses(s):
    """Clear uses and predictions; oracle information stays."""
    s["uses"]["timestamps"] = 0
    for x in range(s["n_experts"]):
        row = s.experts[x]
        row["last_pass"], row["prediction_pass"], row["last_prediction"] = -1, -1, 0
        row["last_use"], row["uses_ever"], row["uses_here"], row["mass_ever"], row["needed"] = 0, 0, 0, 0, 0
