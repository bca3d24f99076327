"""LHU (HOBBIT §3.4): the expert least often used at the highest precision is evicted; lower ones do not count.

`span=sequence` counts within the current request, as HOBBIT does; `span=history` over the run, "like LFU" (SpecMD).
Without precision tiers every use is at the highest, so this is LFU. A prefetch does not count as a use.
"""

from moereplay.policies.blocks import home
from moereplay.policies.contract import Choice, Eviction, Memory, slot

PARAMS = (Choice("span", "sequence", ("sequence", "history")),)
SPAN = slot(PARAMS, "span")
SEQUENCE = 0
COUNT, REQUEST = 0, 1  # columns in the row of an expert's first copy; requests count from 1


def on_use(now, experts, copies, own, y):
    """Count a use of the most precise copy; counts restart with each request."""
    row = own.rows[home(now, y)]
    if own.par[SPAN] == SEQUENCE and row[REQUEST] != now["request"] + 1:
        row[COUNT], row[REQUEST] = 0, now["request"] + 1
    if y % now["precisions"] == 0:
        row[COUNT] += 1


def key(now, experts, copies, own, y):
    """Return the uses at the highest precision."""
    row = own.rows[home(now, y)]
    if own.par[SPAN] == SEQUENCE and row[REQUEST] != now["request"] + 1:
        return 0
    return row[COUNT]


def scope(params):
    """Return the scope: a request ends between passes."""
    return "pass" if params["span"] == "sequence" else "touch"


POLICY = Eviction(
    name="least_high_precision",
    summary="evict the expert with the fewest uses at the highest precision",
    source="HOBBIT §3.4 LHU (sequence); SpecMD §3.1.3 (history)",
    params=PARAMS,
    memory=Memory(rows=2),
    on_use=on_use,
    key=key,
    key_scope=scope,
    reads=frozenset(),
)
