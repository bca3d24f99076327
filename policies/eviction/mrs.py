"""Minus recent score (HybriMoE §IV-D): S = a TopP(s) + (1 - a) S at every gate of a layer; the smallest S is evicted.

s are the router's probabilities of all experts of the layer, over several tokens their mean; TopP keeps the p k largest
(ties to the lowest id) and sets the others to 0: p = 2 in the paper, twice the experts of a token. `a` is unpublished;
0.75 is a port's.
"""

from moereplay.policies.blocks import home, mean_score
from moereplay.policies.contract import Eviction, Memory, Number, always, slot
from moereplay.policies.selection import UNWANTED

PARAMS = (Number("a", 0.75, 0, 1), Number("p", 2, 0, 64))
A, P = slot(PARAMS, "a"), slot(PARAMS, "p")
SCORE = 0  # column in the row of an expert's first copy
FINER = 1 << 16  # S is kept in UNITs / FINER


def on_gate(now, step, experts, copies, own):
    """Move the scores of this layer's experts towards the gate's."""
    first = now["layer"] * now["experts"]
    fresh = top(now, step, own.par[P] * now["k"])
    for e in range(now["experts"]):
        row = own.rows[(first + e) * now["precisions"]]
        row[SCORE] = int(own.par[A] * fresh[e] * FINER + (1.0 - own.par[A]) * row[SCORE])


def top(now, step, kept):
    """Return the mean scores of the layer's experts, 0 for all but the `kept` largest."""
    scores = [mean_score(step, e) for e in range(now["experts"])]
    fresh = [0] * now["experts"]
    for _ in range(min(int(kept), now["experts"])):
        best = 0
        for e in range(1, now["experts"]):
            if scores[e] > scores[best]:
                best = e
        fresh[best], scores[best] = scores[best], UNWANTED
    return fresh


def key(now, experts, copies, own, y):
    """Return S of the copy's expert, in UNITs / FINER."""
    return own.rows[home(now, y)][SCORE]


POLICY = Eviction(
    name="mrs",
    summary="evict the expert with the smallest moving average of top router scores",
    source="HybriMoE §IV-D (MRS)",
    params=PARAMS,
    memory=Memory(rows=1),
    needs=always("logits"),
    on_gate=on_gate,
    key=key,
    reads=frozenset(),
)
