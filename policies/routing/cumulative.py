"""Cumulative probability (arXiv 2412.00099, baseline): `max_rank` whose window each token sets for itself.

The window is the shortest prefix of the ranks whose router probabilities sum to at least `p` of all (of those that the
router may choose, where groups are masked), and at least k: sure tokens get small windows. Probabilities are the
family's scores; where a bias makes them negative they count as none.
"""

from moereplay.policies.contract import Number, Routing, always, slot
from moereplay.policies.routing.max_rank import cached_first, level_of, ranked
from moereplay.policies.selection import protected, routed

PARAMS = (Number("p", 0.9, 0, 1), Number("top_j", -1, -1, 64, integer=True))
P, TOP_J = slot(PARAMS, "p"), slot(PARAMS, "top_j")


def choose(now, step, experts, copies, own, out):
    """Choose for each token, against one snapshot of residency."""
    for t in range(now["tokens"]):
        wanted = routed(step.ids[t])
        order = ranked(step.choice[t], step.ids[t], now["experts"])
        window = max(wanted, shortest(own.par[P], order, step.gate[t]))
        level = [level_of(now, copies, e, 1) for e in order[:window]]
        cached_first(order[:window], level, protected(now, own.par[TOP_J]), wanted, out[t])


def shortest(share, order, scores):
    """Count how many experts in `order`, best first, hold `share` of their scores' sum."""
    whole = 0
    for e in order:
        whole += max(scores[e], 0) if e >= 0 else 0
    held = count = 0
    while count < len(order) and held < share * whole:
        held += max(scores[order[count]], 0) if order[count] >= 0 else 0
        count += 1
    return count


POLICY = Routing(
    name="cumulative",
    summary="prefer resident experts within a probability mass of p",
    source="Mixture of Cache-Conditional Experts, arXiv 2412.00099 §3.2 (Cumsum)",
    params=PARAMS,
    needs=always("logits"),
    choose=choose,
    reads=frozenset({"choice", "ids"}),
)
