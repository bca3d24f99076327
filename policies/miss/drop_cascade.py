"""Drop cascade: a cascade whose last step down is to skip the expert; the best `keep` ranks are always fetched.

`when=importance`: each share of `below` is one step down from the highest of `bits`, and one step more than there are
precisions skips: with `bits=8/4` and `below=.6/.3` the bottom 60 % by gate weight move at 4 bits and the bottom 30 %
not at all; the second share is this project's, as in `cascade`. `when=pressure`: the highest precision that fits into
free memory, nothing if none does. An expert whose best rank over the pass's tokens is within `keep` gets the lowest
precision where it would be skipped. SpecMD gives the name ("Drop-priority") and the rules for drop and for priority,
and leaves open how they meet.
"""

from moereplay.policies.contract import DROP, Choice, Miss, Number, Numbers, slot
from moereplay.policies.miss.cascade import bits, fitting, needs, steps_down

PARAMS = (
    Numbers("bits", (8, 4), 1, 32),
    Choice("when", "importance", ("importance", "pressure")),
    Numbers("below", (0.6, 0.3), 0, 1),
    Number("keep", 2, 0, 64, integer=True),
)
BITS, WHEN = slot(PARAMS, "bits"), slot(PARAMS, "when")
BELOW, KEEP = slot(PARAMS, "below"), slot(PARAMS, "keep")
PRESSURE = 1


def want(now, step, experts, copies, own, n):
    """Return the least sufficient precision for the n-th demanded expert."""
    lowest = int(own.par[BITS]) - 1
    return lowest if own.par[WHEN] == PRESSURE else min(steps_down(own, BELOW, len(step.expert), n), lowest)


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Choose a precision or DROP; under `pressure` one that fits with the other fetches of this step."""
    lowest = int(own.par[BITS]) - 1
    for m in range(len(missing)):
        n = missing[m]
        tier = steps_down(own, BELOW, len(step.expert), n)
        if own.par[WHEN] == PRESSURE:
            tier = fitting_or_more(now, copies, step.expert[n], free, lowest)
        if tier > lowest:
            tier = lowest if step.rank[n] < own.par[KEEP] else DROP
        if tier != DROP:
            free -= copies[step.expert[n] * now["precisions"] + tier]["bytes"]
        verdict[m] = tier


def fitting_or_more(now, copies, x, free, lowest):
    """Return the most precise tier of expert x within `free` bytes; one more than the lowest if none fits."""
    tier = fitting(copies, x, now["precisions"], free, lowest)
    return tier if copies[x * now["precisions"] + tier]["bytes"] <= free else lowest + 1


POLICY = Miss(
    name="drop_cascade",
    summary="fall back to a lower precision on a miss, and then to nothing",
    source="SpecMD §3.1.2 Drop-priority",
    params=PARAMS,
    want=want,
    resolve=resolve,
    needs=needs,
    bits=bits,
    changes_output=True,
    reads=frozenset({"rank"}),
)
