"""Bounded: at most `swaps` of a token's absent experts give way to resident ones, each for at most `regret`.

A swap replaces an absent expert of the token's choice by a resident one among its `m` best ranks (0: twice k) that it
does not use; its regret is what the router gave the one more than the other, not below 0. Of all swaps of a token that
the bound allows the one of least regret is made first, ties by the better rank of the resident, then of the absent. In
`of=mass` regret is router probability, as a share of 1, so that a token gives up at most swaps * regret of it; in
`of=score` it is the choice score, as in the source. `swaps=0` and `regret=0` are the recorded choice. Ranks are the
recorded order, then descending choice score, ties by lowest id; chosen experts run in this order. (In the source a
resident expert takes the place of the one that it replaces.)
"""

from moereplay.policies.contract import NONE, UNIT, Choice, Number, Routing, always, slot
from moereplay.policies.routing.cache_prior import is_resident
from moereplay.policies.routing.max_rank import ranked
from moereplay.policies.selection import routed

PARAMS = (
    Number("regret", 0.02, 0, 1e6),
    Number("swaps", 2, 0, 64, integer=True),
    Number("m", 0, 0, 4096, integer=True),
    Choice("of", "mass", ("mass", "score")),
)
REGRET, SWAPS, M, OF = slot(PARAMS, "regret"), slot(PARAMS, "swaps"), slot(PARAMS, "m"), slot(PARAMS, "of")
SCORE = 1


def choose(now, step, experts, copies, own, out):
    """Choose for each token, against one snapshot of residency."""
    most, of_score = int(own.par[SWAPS]) if own.par[REGRET] > 0 else 0, own.par[OF] == SCORE
    for t in range(now["tokens"]):
        ids, wanted = step.ids[t], routed(step.ids[t])
        window = min(max(int(own.par[M]) if own.par[M] > 0 else 2 * now["k"], wanted), now["experts"])
        order = ranked(step.choice[t], ids, window)
        worth = [step.choice[t][e] + 0.0 if of_score else step.gate[t][e] / UNIT for e in range(now["experts"])]
        runs = [1 if place < wanted else 0 for place in range(window)]
        here = [1 if e != NONE and is_resident(now, copies, e) else 0 for e in order]
        swaps = 0
        while swaps < most and swap(order, worth, runs, here, wanted, own.par[REGRET]):
            swaps += 1
        filled = 0
        for place in range(window):
            if runs[place] == 1:
                out[t][filled] = order[place]
                filled += 1


def swap(order, worth, runs, here, wanted, most):
    """Make the swap of least regret in `runs`, by rank; return whether there was one."""
    best, coming, leaving = most, -1, -1
    for place in range(wanted, len(order)):
        for other in range(wanted):
            if runs[place] == 0 and here[place] == 1 and runs[other] == 1 and here[other] == 0:
                regret = max(worth[order[other]] - worth[order[place]], 0.0)
                if regret < best or (regret == best and coming < 0):
                    best, coming, leaving = regret, place, other
    if coming >= 0:
        runs[coming], runs[leaving] = 1, 0
    return coming >= 0


POLICY = Routing(
    name="bounded",
    summary="swap a few absent experts for resident ones of nearly the same router mass",
    source="bounded cache-aware routing of murillo128/k3-out-of-core (plan 13.6)",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    reads=frozenset({"choice", "ids"}),
)
