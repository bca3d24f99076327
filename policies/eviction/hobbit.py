"""HOBBIT's multidimensional caching (§3.4): smallest w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - d/L) is evicted.

Within the current request: T tokens so far, R the token of the last use, F uses, H uses at the highest precision. A
pass of several tokens counts as one use by its last token.
d counts layers forward around the model, from the execution point. The weights are unpublished (fitted to calibration
data), so each defaults to a quarter; only their proportions matter. HOBBIT never evicts predicted experts:
`mask=true` evicts what a prefetch of this pass suggested or fetched only as a last resort, until its layer's gate.
HOBBIT splits the cache between high and low precision; here copies of all precisions share a pool.
"""

from moereplay.policies.blocks import home, is_predicted
from moereplay.policies.contract import Choice, Eviction, Memory, Number, expert_of, slot

PARAMS = (
    Number("w_lru", 0.25, 0, 1),
    Number("w_lfu", 0.25, 0, 1),
    Number("w_lhu", 0.25, 0, 1),
    Number("w_fld", 0.25, 0, 1),
    Choice("mask", "true", ("true", "false")),
)
W_LRU, W_LFU, W_LHU = slot(PARAMS, "w_lru"), slot(PARAMS, "w_lfu"), slot(PARAMS, "w_lhu")
W_FLD, MASK = slot(PARAMS, "w_fld"), slot(PARAMS, "mask")
TRUE = 0
LAST, USES, HIGH, REQUEST = 0, 1, 2, 3  # columns in the row of an expert's first copy; requests count from 1
SCALE = 1 << 20
CLASS = 1 << 60  # larger than any order inside a class


def on_use(now, experts, copies, own, y):
    """Count a use; counts restart with each request."""
    row = own.rows[home(now, y)]
    if row[REQUEST] != now["request"] + 1:
        row[USES], row[HIGH], row[REQUEST] = 0, 0, now["request"] + 1
    row[LAST] = now["position"] + now["tokens"]
    row[USES] += 1
    if y % now["precisions"] == 0:
        row[HIGH] += 1


def key(now, experts, copies, own, y):
    """Return the weighted sum times T * L, which all candidates share."""
    row, layers, tokens = own.rows[home(now, y)], now["layers"], now["position"] + now["tokens"]
    used = 0.0
    if row[REQUEST] == now["request"] + 1:
        used = own.par[W_LRU] * row[LAST] + own.par[W_LFU] * row[USES] + own.par[W_LHU] * row[HIGH]
    ahead = (experts[expert_of(now, y)]["layer"] - now["layer"]) % layers
    order = int((used * layers + own.par[W_FLD] * tokens * (layers - ahead)) * SCALE)
    masked = own.par[MASK] == TRUE and is_predicted(now, experts, copies, y)
    return order + CLASS if masked else order


POLICY = Eviction(
    name="hobbit",
    summary="evict the expert with the smallest weighted sum of recency, frequency, precision and nearness",
    source="HOBBIT §3.4",
    params=PARAMS,
    memory=Memory(rows=4),
    on_use=on_use,
    key=key,
    key_scope="step",
    reads=frozenset({"prediction_pass"}),
)
