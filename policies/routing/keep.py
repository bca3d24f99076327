"""Keep: the routing of a pruned model, whose router chooses among the experts that were kept (REAP, arXiv 2510.13999).

Each token runs the best of the kept experts of its layer, as many as the router chose; places stay empty where fewer
were kept. Ranks are the recorded order, then descending choice score, ties by lowest id. `profile=given` keeps what
--profile FILE lists, in any order; in layers of which it lists none, routing stays as recorded. `profile=trace` keeps
a share of each layer, `share`, that the trace to be replayed chose most often in its first `tokens` tokens (0: all):
pruning by frequency, a baseline of that paper. (Under one pool per link an expert's place is that among the experts of
its own link.)

Weights are those of the model's own scores. A router that does not renormalise them would give the kept experts more.
"""

from moereplay.policies.blocks import PROFILE_PARAMS, needs, profile
from moereplay.policies.contract import NEVER, Memory, Number, Routing, slot
from moereplay.policies.selection import fill_places, routed

PARAMS = (*PROFILE_PARAMS, Number("share", 0.5, 0, 1))
PROFILE, SHARE = slot(PARAMS, "profile"), slot(PARAMS, "share")
GIVEN = 1
SETTLED, KEPT = 0, 0  # real of a layer: 1 once its rows are filled; row column: 1 for a kept expert's first copy


def choose(now, step, experts, copies, own, out):
    """Choose for each token among the kept experts."""
    first, kept, many = now["layer"] * now["experts"], [0] * now["experts"], 0
    if own.reals[now["layer"]][SETTLED] == 0.0:
        settle(now, experts, own, first)
    for e in range(now["experts"]):
        kept[e] = int(own.rows[(first + e) * now["precisions"]][KEPT])
        many += kept[e]
    for t in range(now["tokens"]):
        ids = step.ids[t]
        for j in range(len(ids)):
            out[t][j] = ids[j]
        if many > 0:
            fill_places(step.choice[t], ids, kept, 0, routed(ids), out[t])


def settle(now, experts, own, first):
    """Mark the kept experts of this layer: all that are listed, or those that fewer than a share rank before."""
    most = now["experts"] if own.par[PROFILE] == GIVEN else max(1, int(own.par[SHARE] * now["experts"]))
    for e in range(now["experts"]):
        before = 0
        for other in range(now["experts"]):
            before += 1 if experts[first + other]["profile"] < experts[first + e]["profile"] else 0
        listed = experts[first + e]["profile"] != NEVER
        own.rows[(first + e) * now["precisions"]][KEPT] = 1 if listed and before < most else 0
    own.reals[now["layer"]][SETTLED] = 1.0


def needs_logits(params):
    """Return the needs: other experts' scores, and the trace's own demand for its profile."""
    return needs(params) | {"logits"}


POLICY = Routing(
    name="keep",
    summary="choose only among the experts that a pruned model keeps",
    source="REAP, arXiv 2510.13999 (and its baseline, frequency)",
    params=PARAMS,
    memory=Memory(rows=1, reals=1),
    needs=needs_logits,
    choose=choose,
    profile=profile,
    drops=True,
    reads=frozenset({"choice", "ids"}),
)
