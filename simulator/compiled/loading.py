"""Loading: what compute itself spends on each demand before it is fetched."""

from __future__ import annotations

from moereplay.policies.contract import NONE
from moereplay.simulator.compiled.counters import LOADING_NS, count
from moereplay.simulator.compiled.link import any_announced
from moereplay.simulator.compiled.links import fetch_announced
from moereplay.simulator.compiled.log import BY_DEMAND, IS_LOAD, span
from moereplay.simulator.compiled.served import FETCH
from moereplay.simulator.compiled.state import accesses, kind_of, load_ns, now
from moereplay.simulator.jit.marks import called, fast


@fast
def begin_loading(s):
    """Nothing of what was looked up has been loaded."""
    s["loading"]["next"] = 0


@called
def next_load(s):
    """The next access to be fetched, in demand order, or NONE."""
    while s["loading"]["next"] < s["gate"]["served"]:
        s["loading"]["next"] += 1
        if accesses(s)[s["loading"]["next"] - 1]["served"] == FETCH:
            return s["loading"]["next"] - 1
    return NONE


@fast
def fetch_all_announced(s):
    """All that was loaded is queued, in demand order."""
    begin_loading(s)
    while any_announced(s):
        fetch_announced(s, accesses(s)[next_load(s)]["y"])


@fast
def load(s, i):
    """Compute begins to have the i-th access loaded; returns for how long, ns."""
    y = accesses(s)[i]["y"]
    spent = load_ns(s)[kind_of(s, y)]
    count(s, LOADING_NS, now(s)["layer"], spent)
    span(s, IS_LOAD, y, 0, spent, BY_DEMAND)
    return spent
