"""Score: every expert whose predicted probability lies above a percentile (SpecMD's reading of Zhu et al.).

`pool=token` uses the percentile of the token's own scores, which suggests a constant count. `pool=running` computes it
over all scores seen so far, of all layers: confident layers then name fewer experts.
"""

from moereplay.policies.contract import Choice, Memory, Number, Prefetch, always, slot
from moereplay.policies.selection import mark, suggest_marked, unmark

PARAMS = (
    Number("percentile", 80, 0, 100),
    Choice("pool", "token", ("token", "running")),
    Number("depth", 1, 1, 8, integer=True),
)
PERCENTILE, POOL, DEPTH = slot(PARAMS, "percentile"), slot(PARAMS, "pool"), slot(PARAMS, "depth")
RUNNING = 1
FINE = 16  # histogram buckets per power of two: the percentile is right to 1/16 of its size
BUCKETS = 26 * FINE
SEEN = BUCKETS  # register: scores counted


def suggest(now, step, experts, copies, own, out):
    """Suggest for each token the experts above the threshold, as a union over the tokens of the pass."""
    count = 0
    for d in range(min(int(own.par[DEPTH]), now["layers"] - 1 - now["layer"])):
        unmark(now, out)
        for t in range(now["tokens"]):
            mark(now, step, d, t, above(own, step.look_score[d][t], step.look_order[d][t]), out)
        count = suggest_marked(now, step, d, out, count)
    return count


def above(own, scores, order):
    """Count a token's scores above the threshold; `order` is descending."""
    if own.par[POOL] == RUNNING:
        return above_running(own, scores, order)
    return above_own(own.par[PERCENTILE], scores, order)


def above_own(percentile, scores, order):
    """Count scores that exceed their own percentile (linear interpolation); `order` is descending."""
    last = len(scores) - 1
    position = last * percentile / 100.0
    lower = min(int(position), last - 1) if last > 0 else 0
    low, high = scores[order[last - lower]], scores[order[max(last - lower - 1, 0)]]
    return leading(scores, order, low + (position - lower) * (high - low))


def leading(scores, order, threshold):
    """Count the descending scores that are larger than the threshold."""
    count = 0
    while count < len(scores) and scores[order[count]] > threshold:
        count += 1
    return count


def above_running(own, scores, order):
    """Count the scores into the histogram, then how many lie in buckets above the one that holds the percentile."""
    counts = own.regs[0]
    for e in range(len(scores)):
        counts[bucket(scores[e])] += 1
    counts[SEEN] += len(scores)
    below, at = counts[0], 0
    while below * 100.0 < own.par[PERCENTILE] * counts[SEEN]:
        at += 1
        below += counts[at]
    count = 0
    while count < len(scores) and bucket(scores[order[count]]) > at:
        count += 1
    return count


def bucket(score):
    """Return the bucket by power of two and the next four bits, in integers so that every engine agrees.

    Scores below 0 are the smallest.
    """
    power, score = 0, max(score, 0)
    while score >> power >= 2 * FINE:
        power += 1
    return min(power * FINE + (score >> power), BUCKETS - 1)


def depth(params):
    """Return the number of look-ahead layers that are read."""
    return params["depth"]


POLICY = Prefetch(
    name="score",
    summary="prefetch every expert predicted above a percentile",
    source="SpecMD §3.1.4, score-based",
    params=PARAMS,
    memory=Memory(regs=BUCKETS + 1),
    needs=always("lookahead"),
    suggest=suggest,
    depth=depth,
    reads=frozenset(),
)
