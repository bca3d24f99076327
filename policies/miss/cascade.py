"""Cascade: the highest precision, falling back to lower ones for a miss.

`when=importance` degrades the least important part of the demand: `below=.6/.3` with `bits=8/4/2` takes 4 bits for the
bottom 60 % by gate weight and 2 bits for the bottom 30 %. SpecMD has the precisions 8:4:2 (§3.1.2) and the first share
(§5.4, "the bottom 60th percentile"); the second share, half of the first, is this project's. `when=pressure` takes the
highest precision that fits into free memory, and accepts any resident one.
"""

from moereplay.policies.contract import Choice, Miss, Numbers, slot

PARAMS = (
    Numbers("bits", (8, 4, 2), 1, 32),
    Choice("when", "importance", ("importance", "pressure")),
    Numbers("below", (0.6, 0.3), 0, 1),
)
BITS, WHEN, BELOW = slot(PARAMS, "bits"), slot(PARAMS, "when"), slot(PARAMS, "below")
PRESSURE = 1


def want(now, step, experts, copies, own, n):
    """Return the least sufficient precision for the n-th demanded expert."""
    lowest = int(own.par[BITS]) - 1
    return lowest if own.par[WHEN] == PRESSURE else min(steps_down(own, BELOW, len(step.expert), n), lowest)


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Choose the wanted precision, or under `pressure` the highest that fits with the other fetches of this step."""
    lowest = int(own.par[BITS]) - 1
    for m in range(len(missing)):
        tier = want(now, step, experts, copies, own, missing[m])
        if own.par[WHEN] == PRESSURE:
            tier = fitting(copies, step.expert[missing[m]], now["precisions"], free, lowest)
            free -= copies[step.expert[missing[m]] * now["precisions"] + tier]["bytes"]
        verdict[m] = tier


def steps_down(own, below, demanded, n):
    """Return how many tiers below the top the n-th of `demanded` experts is, by the shares at slot `below`."""
    degraded = 0
    for tier in range(int(own.par[below])):
        # demand order is by descending importance, so the bottom fraction is the tail
        if demanded - n <= own.par[below + 1 + tier] * demanded:
            degraded = tier + 1
    return degraded


def fitting(copies, x, precisions, free, lowest):
    """Return the most precise tier of expert x within `free` bytes, else the lowest."""
    for tier in range(lowest):
        if copies[x * precisions + tier]["bytes"] <= free:
            return tier
    return lowest


def needs(params):
    """Return the needs: gate weights, where a share of the demand is chosen by importance."""
    return frozenset({"weights"} if params["when"] == "importance" else ())


def bits(params):
    """Return the tiers, most precise first."""
    return params["bits"]


POLICY = Miss(
    name="cascade",
    summary="fall back to a lower precision on a miss",
    source="SpecMD §3.1.2 Fetch-priority, §5.4",
    params=PARAMS,
    want=want,
    resolve=resolve,
    needs=needs,
    bits=bits,
    changes_output=True,
    reads=frozenset(),
)
