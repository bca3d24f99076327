"""Piggyback (OEA, arXiv 2511.02237, as its abstract has it): a token's lesser experts are those that others need too.

Each token keeps its `keep` best ranks. Its other places go to the best of the experts that some token of the pass keeps
(with `also=resident` also of those that are resident), in the token's own order; if these are fewer, places stay empty.
So a step demands no expert that no token keeps, and may demand fewer. Ranks are the recorded order, then descending
choice score, ties by lowest id. k is the most that a token runs, `keep` of at least k the recorded choice. In decode
passes only; `phase=any` in all. A pass of one token runs its `keep` best.
"""

from moereplay.policies.contract import DECODE, NONE, Choice, Number, Routing, always, slot
from moereplay.policies.routing.cache_prior import is_resident
from moereplay.policies.selection import fill_places, routed

PARAMS = (
    Number("keep", 4, 1, 64, integer=True),
    Choice("also", "none", ("none", "resident")),
    Choice("phase", "decode", ("decode", "any")),
)
KEEP, ALSO, PHASE = slot(PARAMS, "keep"), slot(PARAMS, "also"), slot(PARAMS, "phase")
RESIDENT_TOO, ANY = 1, 1


def choose(now, step, experts, copies, own, out):
    """Choose for each token, against one snapshot of residency."""
    keep, active = int(own.par[KEEP]), now["phase"] == DECODE or own.par[PHASE] == ANY
    needed = [0] * now["experts"]
    for t in range(now["tokens"]):
        for e in step.ids[t][:keep]:
            if e != NONE:
                needed[e] = 1
    if own.par[ALSO] == RESIDENT_TOO:
        for e in range(now["experts"]):
            needed[e] = 1 if needed[e] == 1 or is_resident(now, copies, e) else 0
    for t in range(now["tokens"]):
        ids = step.ids[t]
        for j in range(len(ids)):
            out[t][j] = ids[j]
        if active and routed(ids) > keep:
            fill_places(step.choice[t], ids, needed, keep, routed(ids), out[t])


POLICY = Routing(
    name="piggyback",
    summary="beyond the `keep` best, run only experts that the batch needs in any case",
    source="Opportunistic Expert Activation, arXiv 2511.02237",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    drops=True,
    reads=frozenset({"choice", "ids"}),
)
