"""Oracle: a predictor of given quality, made from the demand itself, to show the value of a better predictor.

For each of the next `horizon` layers of this pass, every expert that the recorded demand will use is suggested with
probability `recall`, in demand order, followed by as many wrong ones as make the share of right ones `precision`
(rounded at random to keep the mean). Wrong ones are among the experts that the layer will not use: any of them
(`wrong=any`), or those used most often so far (`wrong=frequent`), as a predictor that errs prefers the usual ones. A
layer's draws are a hash of seed, pass, layer and expert, so a gate nearer to it predicts the same.
"""

from moereplay.policies.blocks import MODULUS, counter_hash
from moereplay.policies.contract import Choice, Number, Prefetch, always, expert_of, slot

PARAMS = (
    Number("recall", 1.0, 0, 1),
    Number("precision", 1.0, 0.01, 1),
    Number("horizon", 1, 1, 64, integer=True),
    Choice("wrong", "any", ("any", "frequent"), added=True),
)
RECALL, PRECISION, HORIZON = slot(PARAMS, "recall"), slot(PARAMS, "precision"), slot(PARAMS, "horizon")
WRONG = slot(PARAMS, "wrong")
FREQUENT = 1


def suggest(now, step, experts, copies, own, out):
    """Suggest nearest layer first, correct predictions before wrong ones, which is optimistic."""
    count = 0
    for layer in range(now["layer"] + 1, min(now["layer"] + 1 + int(own.par[HORIZON]), now["layers"])):
        right = suggest_right(now, experts, own, layer, out, count)
        count = suggest_wrong(now, experts, own, layer, out, right, wrong_beside(now, own, layer, right - count))
    return count


def is_demanded(now, expert):
    """Return whether this pass will use the expert of a later layer."""
    return expert["next_pass"] == now["pass"]


def suggest_right(now, experts, own, layer, out, count):
    """Append the recalled experts of the layer in demand order."""
    first, begin = layer * now["experts"], count
    for e in range(now["experts"]):
        hash_ = counter_hash(now["seed"], now["pass"], layer, e)
        if is_demanded(now, experts[first + e]) and hash_ < own.par[RECALL] * MODULUS:
            place = count
            while place > begin and comes_before(now, experts, first + e, out[place - 1]):
                out[place] = out[place - 1]
                place -= 1
            out[place] = (first + e) * now["precisions"]
            count += 1
    return count


def comes_before(now, experts, x, y):
    """Return whether x is demanded before y's expert."""
    return experts[x]["next_use"] < experts[expert_of(now, y)]["next_use"]


def wrong_beside(now, own, layer, right):
    """Return how many wrong predictions accompany a number of correct ones."""
    exact = right * (1.0 - own.par[PRECISION]) / own.par[PRECISION]
    return int(exact + counter_hash(now["seed"], now["pass"], layer, now["experts"]) / MODULUS)


def suggest_wrong(now, experts, own, layer, out, count, wrong):
    """Append experts that the layer will not use: the most frequent ones if asked, then those of smallest hash."""
    first, taken = layer * now["experts"], [0] * now["experts"]
    for _ in range(wrong):
        best, smallest, most = -1, 0, 0
        for e in range(now["experts"]):
            hash_ = counter_hash(now["seed"], now["pass"], layer, now["experts"] + 1 + e)
            uses = experts[first + e]["uses_ever"] if own.par[WRONG] == FREQUENT else 0
            better = best < 0 or uses > most or (uses == most and hash_ < smallest)
            if better and taken[e] == 0 and not is_demanded(now, experts[first + e]):
                best, smallest, most = e, hash_, uses
        if best < 0:
            return count
        taken[best] = 1
        out[count] = (first + best) * now["precisions"]
        count += 1
    return count


def reach(params):
    """Return how many layers ahead are predicted."""
    return params["horizon"]


POLICY = Prefetch(
    name="oracle",
    summary="prefetch the actual demand, at a given recall and precision",
    source="parametric; Si et al. (arXiv 2608.12103) price one-layer oracles so",
    params=PARAMS,
    needs=always("future"),
    suggest=suggest,
    reach=reach,
    reads=frozenset({"next_pass", "next_use"}),
)
