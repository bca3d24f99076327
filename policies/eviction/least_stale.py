"""Least-Stale (SpecMD §4.2): experts not touched in this pass are evicted before those that were.

A copy is *current* if it was used, arrived by prefetch or was suggested by one in this pass, else *stale*. SpecMD's
order inside each class, "FIFO by layer position", has four readings. `order=c` evicts what is needed last, in layers:
what the current layer's step does not need, then the layer just passed, and the next layer last. `order=d` takes the
text literally: passed layers first, the lowest of them first, then the farthest ahead. `order=a` evicts the lowest
layer first, `order=b` the last access first.
"""

from moereplay.policies.contract import Choice, Eviction, expert_of, slot

PARAMS = (
    Choice("order", "c", ("c", "a", "b", "d")),
    Choice("current", "cyclic", ("cyclic", "fifo")),
    Choice("prefetch_evicts_current", "true", ("true", "false")),
)
ORDER, CURRENT, EVICTS_CURRENT = slot(PARAMS, "order"), slot(PARAMS, "current"), slot(PARAMS, "prefetch_evicts_current")
C, A, B, D = 0, 1, 2, 3
FIFO = 1
FALSE = 1
CLASS = 1 << 50  # larger than any order inside a class


def is_current(now, experts, copies, y):
    """Return whether the copy's generation is this pass."""
    expert = experts[expert_of(now, y)]
    return expert["last_pass"] == now["pass"] or expert["prediction_pass"] == now["pass"]


def layers_ahead(now, experts, y):
    """Return the layers until its next turn; L if its layer does not use it again in this pass."""
    expert = experts[expert_of(now, y)]
    if expert["layer"] == now["layer"] and now["gated"] == 1 and expert["needed"] == 0:
        return now["layers"]
    ahead = expert["layer"] - now["layer"]
    return ahead if ahead >= 0 else ahead + now["layers"]


def key(now, experts, copies, own, y):
    """Return the key: class first, then the order of the chosen reading."""
    current = is_current(now, experts, copies, y)
    order = own.par[ORDER]
    if order != A and (order == B or (current and own.par[CURRENT] == FIFO)):
        inside = experts[expert_of(now, y)]["last_use"]
    elif order == C:
        inside = now["layers"] - layers_ahead(now, experts, y)
    elif order == A:
        inside = y
    else:
        ahead, layer = layers_ahead(now, experts, y), experts[expert_of(now, y)]["layer"]
        passed = layer < now["layer"] or ahead == now["layers"]
        inside = layer - now["layers"] if passed else now["layers"] - ahead
    return inside + CLASS if current else inside


def key_scope(params):
    """Return the scope: keys by layer and keys by use do not move by the same amount."""
    return "step" if params["order"] == "c" and params["current"] == "fifo" else "layer"


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Reject a prefetch at the cost of a current copy, with `prefetch_evicts_current=false`."""
    guarded = prefetched and own.par[EVICTS_CURRENT] == FALSE
    return not (guarded and is_current(now, experts, copies, y_out))


def declines(params):
    """Return whether admission may be rejected, for the sake of current copies only."""
    return params["prefetch_evicts_current"] == "false"


POLICY = Eviction(
    name="least_stale",
    summary="evict experts that this pass has not touched first, then by layer",
    source="SpecMD §4.2",
    params=PARAMS,
    key=key,
    key_scope=key_scope,
    admit=admit,
    declines=declines,
    reads=frozenset({"prediction_pass", "needed"}),
)
