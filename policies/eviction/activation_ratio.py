"""MoE-Infinity (2401.14361): the expert of smallest (n / N + e) (1 - l / L) (f / F + e) is evicted, e = 1e-6.

Of the N assignments of its layer l in the current request, n are the expert's (1 / E before there are any), as are f of
all F in the run. Early layers are kept, because there is least time to prefetch for them. The authors' code splits an
encoder-decoder stack in two for its layer term, which is 1 up to the layer in progress, and adds e after it divides by
the whole matrix; this is the decreasing half, over all layers, and the paper's normalisation. `frequency=false` leaves
the last factor out. They never evict prefetched experts: `mask=true` evicts what a prefetch of this pass suggested or
fetched only as a last resort, until its layer's gate.
"""

from moereplay.policies.blocks import home, is_predicted
from moereplay.policies.contract import Choice, Eviction, Memory, expert_of, slot

PARAMS = (Choice("frequency", "true", ("true", "false")), Choice("mask", "true", ("true", "false")))
FREQUENCY, MASK = slot(PARAMS, "frequency"), slot(PARAMS, "mask")
TRUE = 0
COUNT, REQUEST, EVER = 0, 1, 2  # columns in the row of an expert's first copy; requests count from 1
ALL = 0  # register of pool 0: assignments of the run
IN_LAYER, OF_REQUEST = 0, 1  # reals: assignments of the request, and which request
SMALL = 1e-6
SCALE = float(1 << 58)
CLASS = 1 << 60  # larger than any order inside a class


def on_gate(now, step, experts, copies, own):
    """Count the assignments of this gate."""
    layer, request = own.reals[now["layer"]], now["request"] + 1
    if layer[OF_REQUEST] != request:
        layer[IN_LAYER], layer[OF_REQUEST] = 0.0, float(request)
    for n in range(len(step.expert)):
        row, tokens = own.rows[step.expert[n] * now["precisions"]], step.tokens[n]
        if row[REQUEST] != request:
            row[COUNT], row[REQUEST] = 0, request
        row[COUNT] += tokens
        row[EVER] += tokens
        layer[IN_LAYER] += tokens
        own.regs[0][ALL] += tokens


def key(now, experts, copies, own, y):
    """Return the product above in units of 2**-58; under `mask` predicted experts rank above all others."""
    row, layer = own.rows[home(now, y)], experts[expert_of(now, y)]["layer"]
    order = (ratio(now, own, row, layer) + SMALL) * (1.0 - layer / now["layers"])
    if own.par[FREQUENCY] == TRUE:
        order *= row[EVER] / max(own.regs[0][ALL], 1) + SMALL
    masked = own.par[MASK] == TRUE and is_predicted(now, experts, copies, y)
    return int(order * SCALE) + (CLASS if masked else 0)


def ratio(now, own, row, layer):
    """Return the expert's share of its layer's assignments in this request."""
    request = now["request"] + 1
    if own.reals[layer][OF_REQUEST] != request:
        return 1.0 / now["experts"]
    return row[COUNT] / max(own.reals[layer][IN_LAYER], 1.0) if row[REQUEST] == request else 0.0


POLICY = Eviction(
    name="activation_ratio",
    summary="evict the expert with the smallest activation ratio in this request, weighted by layer and frequency",
    source="MoE-Infinity 2401.14361; priority_score in its code",
    params=PARAMS,
    memory=Memory(rows=3, regs=1, reals=2),
    on_gate=on_gate,
    key=key,
    key_scope="step",
    reads=frozenset({"prediction_pass"}),
)
