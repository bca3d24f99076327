"""How an access is served."""

from __future__ import annotations

from simulator.compiled.runtime.jit import fast

HIT, LATE, FETCH, DROPPED, ON_CPU, REPLACED = range(6)  #: REPLACED by substitutes, for every token


@fast
def runs_here(served):
    """From the fast tier, after a wait or at once."""
    return served <= FETCH


@fast
def runs(served):
    """Anywhere: there or on the CPU."""
    return served <= FETCH or served == ON_CPU


@fast
def waits(served):
    """For the link."""
    return served == LATE or served == FETCH
