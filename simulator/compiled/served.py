"""How an access is served: a hit, a delayed hit, a miss that is fetched, and what else becomes of a miss."""

from __future__ import annotations

from moereplay.simulator.jit.marks import fast

#: REPLACED by substitutes, for every token. HAS_RUN where compute takes several rounds.
HIT, DELAYED, FETCH, DROPPED, ON_CPU, REPLACED, HAS_RUN = range(7)


@fast
def runs_here(served):
    """Whether it runs from the fast tier, after a wait or at once."""
    return served <= FETCH


@fast
def runs(served):
    """Whether it runs at all: there or on the CPU."""
    return served <= FETCH or served == ON_CPU


@fast
def waits(served):
    """Whether compute waits for its transfer."""
    return served == DELAYED or served == FETCH
