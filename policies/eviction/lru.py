"""Least recently used: the copy whose expert's last use is the oldest leaves.

SpecMD does not say whether a prefetch that names a resident expert refreshes it. `touch_on_predict=true` does.
"""

from policies.contract import Choice, Eviction, expert_of, slot

PARAMS = (Choice("touch_on_predict", "false", ("false", "true")),)
TOUCH = slot(PARAMS, "touch_on_predict")
TRUE = 1


def key(now, experts, copies, own, y):
    """The stamp of the last use, or of the last naming if that counts and is newer."""
    expert = experts[expert_of(now, y)]
    if own.par[TOUCH] == TRUE:
        return max(expert["last_use"], expert["last_hint"])
    return expert["last_use"]


def queue(params):
    """Of last uses, unless namings count."""
    return "last_use" if params["touch_on_predict"] == "false" else ""


POLICY = Eviction(
    name="lru",
    summary="oldest last use leaves",
    source="Denning 1968; SpecMD §3",
    params=PARAMS,
    key=key,
    queue=queue,
    reads=frozenset({"last_hint"}),
)
