"""SMoE's score window and shield (Zhu et al. 2508.18983): evicts the smallest mean score of the last n + 1 passes.

Scores are the router's probabilities of all experts, including those that were not chosen; an iteration is a pass, over
several tokens their mean (in the authors' code every token of a prefill is one). n is unpublished. Ties go by least
recent timestamp, then lowest id. Predicted experts are shielded: what a prefetch suggests or fetches is evicted after
all others, until it is used. The shield holds half of the pool's bytes; the oldest prediction gives way. What this step
uses is pinned.
"""

from moereplay.policies.blocks import (
    LIST,
    PREV,
    REGISTERS_PER_LIST,
    ROW_COLUMNS,
    held,
    home,
    mean_score,
    move,
    oldest,
    push,
    unlink,
)
from moereplay.policies.contract import Eviction, Memory, Number, always, expert_of, slot

MOST = 64  # iterations
PARAMS = (Number("n", 15, 0, MOST - 1, integer=True),)
N = slot(PARAMS, "n")
SHIELDED, EXPOSED = 1, 2  # lists: every resident is in one of them
TOTAL, RING = ROW_COLUMNS, ROW_COLUMNS + 1  # row columns: sum of scores; scores, in the row of the first copy
ITERATIONS = 0  # real: of this layer
FINER = 1 << 20  # means of MOST iterations differ by 1 / MOST^2 or more; biased scores still fit 64 bits


def on_gate(now, step, experts, copies, own):
    """Replace the oldest scores of this layer with the newest."""
    first, window = now["layer"] * now["experts"], int(own.par[N]) + 1
    at = int(own.reals[now["layer"]][ITERATIONS]) % window
    for e in range(now["experts"]):
        row, score = own.rows[(first + e) * now["precisions"]], mean_score(step, e)
        row[TOTAL] += score - row[RING + at]
        row[RING + at] = score
    own.reals[now["layer"]][ITERATIONS] += 1.0


def mean_of(now, experts, own, y):
    """Return the mean over the iterations in the window, in UNITs / FINER."""
    seen = int(own.reals[experts[expert_of(now, y)]["layer"]][ITERATIONS])
    return own.rows[home(now, y)][TOTAL] * FINER // max(1, min(seen, int(own.par[N]) + 1))


def on_predict(now, experts, copies, own, y):
    """Shield a resident that is predicted."""
    if own.rows[y][LIST] > 0:
        shield(copies, own, y)


def on_insert(now, experts, copies, own, y, prefetched):
    """Shield a prefetched copy."""
    push(own, copies[y]["pool"], EXPOSED, y, copies[y]["bytes"])
    if prefetched:
        shield(copies, own, y)


def shield(copies, own, y):
    """Shield a copy; if needed, unshield the oldest shielded copies."""
    pool = copies[y]["pool"]
    if own.rows[y][LIST] == EXPOSED:
        move(copies, own, y, SHIELDED)
    while held(own, pool, SHIELDED) * 2 > own.capacity[pool]:
        move(copies, own, oldest(own, pool, SHIELDED), EXPOSED)


def on_use(now, experts, copies, own, y):
    """Remove the shield of a prediction that came true."""
    if own.rows[y][LIST] == SHIELDED:
        move(copies, own, y, EXPOSED)


def on_evict(now, experts, copies, own, y):
    """Unlink the copy from the shield."""
    unlink(own, copies[y]["pool"], y, copies[y]["bytes"])


def victim(now, experts, copies, own, pool, y_in):
    """Return the victim: unshielded before shielded, then by mean score, timestamp and id."""
    best = smallest(now, experts, copies, own, pool, EXPOSED)
    return best if best >= 0 else smallest(now, experts, copies, own, pool, SHIELDED)


def smallest(now, experts, copies, own, pool, which):
    """Return the candidate of a list that is evicted first, or -1."""
    best, y = -1, oldest(own, pool, which)
    while y >= 0:
        if copies[y]["protected"] == 0 and (best < 0 or leaves_before(now, experts, own, y, best)):
            best = y
        y = own.rows[y][PREV] - 1
    return best


def leaves_before(now, experts, own, y, other):
    """Return whether y is evicted before the other."""
    mean, others = mean_of(now, experts, own, y), mean_of(now, experts, own, other)
    if mean != others:
        return mean < others
    mine, others = experts[expert_of(now, y)]["last_use"], experts[expert_of(now, other)]["last_use"]
    return y < other if mine == others else mine < others


POLICY = Eviction(
    name="shielded_score",
    summary="evict the expert with the smallest mean router score of recent passes, predicted experts last",
    source="SMoE: Zhu et al. 2508.18983 §4 and their code",
    params=PARAMS,
    memory=Memory(rows=ROW_COLUMNS + 1 + MOST, regs=2 * REGISTERS_PER_LIST, reals=1),
    needs=always("logits"),
    on_gate=on_gate,
    on_use=on_use,
    on_insert=on_insert,
    on_evict=on_evict,
    on_predict=on_predict,
    victim=victim,
    reads=frozenset(),
)
