"""Activation matrix (MoE-Infinity, arXiv 2401.14361): the rest of the pass as in the most similar past request.

A request's matrix counts tokens by layer and expert. Its layers seen so far are compared with those of the last `kept`
requests by the mean over layers of their rows' cosine, ties to the most recent; expert e of a later layer l' is then
suggested by descending (m + 1e-8) * (1 - (l' - l) / (L + 1)), where m is its share of the nearest matrix's row, ties by
lowest id. The queue is made anew at every gate.

`enqueue=seen` suggests experts with m > 0; `enqueue=all` every expert of the later layers, as the small constant has
it. When the collection is full the oldest matrix makes room. The published code hides the executed rows before it
compares, which looks inverted: this is what the paper says. A reset forgets the collection, too.
"""

import math

from moereplay.policies.contract import Choice, Memory, Number, Prefetch, slot
from moereplay.policies.selection import sort_descending

MOST = 64
PARAMS = (Number("kept", 32, 1, MOST, integer=True), Choice("enqueue", "seen", ("seen", "all")))
KEPT, ENQUEUE = slot(PARAMS, "kept"), slot(PARAMS, "enqueue")
ALL = 1
EVERY_LAYER = 1 << 30  # more than any model has
EPSILON = 1e-8
CURRENT, PAST = 0, 1  # row columns: tokens of the request in progress; of past requests
REQUEST, STORED = 0, 1  # registers: 1 + the request in progress; requests stored so far


def on_gate(now, step, experts, copies, own):
    """Record this step's demand, and update the comparison of its layer."""
    if own.regs[0][REQUEST] != now["request"] + 1:
        begin_request(now, own)
    for n in range(len(step.expert)):
        own.rows[step.expert[n] * now["precisions"]][CURRENT] += step.tokens[n]
    for past in range(min(own.regs[0][STORED], int(own.par[KEPT]))):
        own.reals[now["layer"]][past] = cosine(now, own, now["layer"], PAST + past)


def begin_request(now, own):
    """Store the matrix of the request before, if there was one, in place of the oldest."""
    registers, kept = own.regs[0], int(own.par[KEPT])
    if registers[REQUEST] > 0:
        place = PAST + registers[STORED] % kept
        for x in range(now["layers"] * now["experts"]):
            row = own.rows[x * now["precisions"]]
            row[place], row[CURRENT] = row[CURRENT], 0
        registers[STORED] += 1
    for layer in range(now["layers"]):
        for past in range(kept):
            own.reals[layer][past] = 0.0
    registers[REQUEST] = now["request"] + 1


def cosine(now, own, layer, past):
    """Return the cosine of a layer's rows in the current and a past request; 0 if either is empty."""
    product = current_square = past_square = 0
    for x in range(layer * now["experts"], (layer + 1) * now["experts"]):
        row = own.rows[x * now["precisions"]]
        product += row[CURRENT] * row[past]
        current_square += row[CURRENT] * row[CURRENT]
        past_square += row[past] * row[past]
    if current_square == 0 or past_square == 0:
        return 0.0
    return product / (math.sqrt(current_square) * math.sqrt(past_square))


def suggest(now, step, experts, copies, own, out):
    """Suggest all experts that the nearest matrix predicts for the later layers."""
    past = nearest(now, own)
    if past < 0:
        return 0
    later = (now["layers"] - 1 - now["layer"]) * now["experts"]
    priorities, promised, count = [0.0] * later, [0] * later, 0
    for layer in range(now["layer"] + 1, now["layers"]):
        count = promise(now, own, layer, past, priorities, promised, count)
    priorities, promised = priorities[:count], promised[:count]
    sort_descending(priorities, promised)
    for i in range(count):
        out[i] = promised[i] * now["precisions"]
    return count


def nearest(now, own):
    """Return the column of the past request of largest similarity, ties to the most recent; -1 without any."""
    stored, kept = own.regs[0][STORED], int(own.par[KEPT])
    best, most = -1, -1.0
    for back in range(1, min(stored, kept) + 1):
        past = (stored - back) % kept
        similarity = 0.0
        for layer in range(now["layers"]):
            similarity += own.reals[layer][past]
        if similarity > most:
            best, most = PAST + past, similarity
    return best


def promise(now, own, layer, past, priorities, promised, count):
    """Append a later layer's experts and their priorities; returns the new count."""
    whole, first = 0, layer * now["experts"]
    for x in range(first, first + now["experts"]):
        whole += own.rows[x * now["precisions"]][past]
    decay = 1.0 - (layer - now["layer"]) / (now["layers"] + 1.0)
    for x in range(first, first + now["experts"]):
        tokens = own.rows[x * now["precisions"]][past]
        if tokens > 0 or own.par[ENQUEUE] == ALL:
            share = tokens / whole if whole > 0 else 0.0
            priorities[count], promised[count] = (share + EPSILON) * decay, x
            count += 1
    return count


POLICY = Prefetch(
    name="activation_matrix",
    summary="prefetch what followed in the most similar past request",
    source="MoE-Infinity, arXiv 2401.14361",
    params=PARAMS,
    memory=Memory(rows=1 + MOST, regs=2, reals=MOST),
    on_gate=on_gate,
    suggest=suggest,
    reach=lambda params: EVERY_LAYER,
    renews_queue=True,
    reads=frozenset(),
)
