"""Score-based: the expert with the smallest sum of gate weights is evicted (SpecMD's reading of Zhu et al.).

SpecMD uses a running history and gives no window: `over=sum` covers everything since the start, `over=window` the
last `window` passes, this one included. Weights are counted at the gate and survive evictions; a prefetch adds nothing.
"""

from moereplay.policies.blocks import home
from moereplay.policies.contract import Choice, Eviction, Memory, Number, always, expert_of, slot

MOST = 64  # passes; columns in the row of an expert's first copy: its weight in pass p is at p % window
PARAMS = (Choice("over", "sum", ("sum", "window")), Number("window", 16, 1, MOST, integer=True))
OVER, WINDOW = slot(PARAMS, "over"), slot(PARAMS, "window")
SUM = 0
NEWEST, COUNTED = MOST, MOST + 1  # more columns: the last pass that demanded it, and its weight since the start


def on_gate(now, step, experts, copies, own):
    """Enter the weights of this pass."""
    if own.par[OVER] == SUM:
        return
    window = int(own.par[WINDOW])
    for n in range(len(step.expert)):
        x = step.expert[n]
        row = own.rows[x * now["precisions"]]
        for passed in range(max(row[NEWEST] + 1, now["pass"] - window + 1), now["pass"] + 1):
            row[passed % window] = 0
        row[now["pass"] % window] += experts[x]["mass_ever"] - row[COUNTED]
        row[NEWEST], row[COUNTED] = now["pass"], experts[x]["mass_ever"]


def key(now, experts, copies, own, y):
    """Return the gate weight of its assignments, since the start or in the window."""
    if own.par[OVER] == SUM:
        return experts[expert_of(now, y)]["mass_ever"]
    row, window, total = own.rows[home(now, y)], int(own.par[WINDOW]), 0
    for passed in range(max(now["pass"] - window + 1, 0), row[NEWEST] + 1):
        total += row[passed % window]
    return total


def scope(params):
    """Return the scope: the window moves with every pass."""
    return "touch" if params["over"] == "sum" else "pass"


POLICY = Eviction(
    name="score",
    summary="evict the expert with the smallest accumulated gate weight",
    source="SpecMD (SB)",
    params=PARAMS,
    memory=Memory(rows=MOST + 2),
    needs=always("weights"),
    on_gate=on_gate,
    key=key,
    key_scope=scope,
    reads=frozenset({"mass_ever"}),
)
