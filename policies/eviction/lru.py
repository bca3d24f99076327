"""Least recently used: the copy whose expert's last use is the oldest is evicted.

SpecMD does not specify whether suggesting a resident expert refreshes it; `touch_on_predict=true` does.
"""

from moereplay.policies.contract import Choice, Eviction, expert_of, slot

PARAMS = (Choice("touch_on_predict", "false", ("false", "true")),)
TOUCH = slot(PARAMS, "touch_on_predict")
TRUE = 1


def key(now, experts, copies, own, y):
    """Return the logical timestamp of the last use, or of a newer prediction with `touch_on_predict`."""
    expert = experts[expert_of(now, y)]
    if own.par[TOUCH] == TRUE:
        return max(expert["last_use"], expert["last_prediction"])
    return expert["last_use"]


def queue(params):
    """Return the queue: the key is the timestamp of the last use, unless predictions count."""
    return "last_use" if params["touch_on_predict"] == "false" else ""


POLICY = Eviction(
    name="lru",
    summary="evict the expert whose last use is oldest",
    source="Denning 1968; SpecMD §3.1.3",
    params=PARAMS,
    key=key,
    queue=queue,
    reads=frozenset({"last_prediction"}),
)
