"""Previous token: for each of the next `depth` layers, the experts that the token before this pass used there.

The token is the last one of the latest pass, of the same request: a request's first pass suggests nothing. A baseline
of locality between neighbouring tokens, which needs ids alone.
"""

from moereplay.policies.contract import Memory, Number, Prefetch, slot

PARAMS = (Number("depth", 1, 1, 8, integer=True),)
DEPTH = slot(PARAMS, "depth")
CHOICE = 0  # row column: of the layer's j-th expert, 1 + the expert that the remembered token used in rank j
REQUEST = 0  # real: 1 + the request of the token that the layer remembers


def suggest(now, step, experts, copies, own, out):
    """Suggest experts, the nearest layer first, in rank order; then remember the last token of this pass."""
    count = 0
    for layer in range(now["layer"] + 1, min(now["layer"] + 1 + int(own.par[DEPTH]), now["layers"])):
        if own.reals[layer][REQUEST] == now["request"] + 1.0:
            count = recall(now, own, layer, out, count)
    remember(now, step, own)
    return count


def recall(now, own, layer, out, count):
    """Append the experts that the remembered token used in the layer."""
    first = layer * now["experts"]
    for j in range(now["k"]):
        e = own.rows[(first + j) * now["precisions"]][CHOICE] - 1
        if e >= 0:
            out[count] = (first + e) * now["precisions"]
            count += 1
    return count


def remember(now, step, own):
    """Keep the last token's experts in rank order."""
    own.reals[now["layer"]][REQUEST] = now["request"] + 1.0
    ids, first = step.ids[now["tokens"] - 1], now["layer"] * now["experts"]
    for j in range(now["k"]):
        own.rows[(first + j) * now["precisions"]][CHOICE] = ids[j] + 1


def reach(params):
    """Return how many layers ahead are predicted."""
    return params["depth"]


POLICY = Prefetch(
    name="previous_token",
    summary="prefetch experts that the previous token used in the next layers",
    source="a baseline; temporal locality as in Eliseev & Mazur (arXiv 2312.17238) §3.1",
    params=PARAMS,
    memory=Memory(rows=1, reals=1),
    suggest=suggest,
    reach=reach,
    reads=frozenset({"ids"}),
)
