"""Lowest bit: every missing expert is fetched at the lowest precision tier; a resident copy of any precision serves."""

from moereplay.policies.contract import Miss, Numbers, slot

PARAMS = (Numbers("bits", (8, 4, 2), 1, 32),)
BITS = slot(PARAMS, "bits")


def want(now, step, experts, copies, own, n):
    """Return the lowest tier."""
    return int(own.par[BITS]) - 1


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Set every verdict to the lowest tier."""
    for m in range(len(missing)):
        verdict[m] = int(own.par[BITS]) - 1


def bits(params):
    """Return the tiers, most precise first; prefetches bring the first."""
    return params["bits"]


POLICY = Miss(
    name="lowest_bit",
    summary="load the expert at the lowest precision",
    source="SpecMD §3.1.2 Fetch-lowest-bit",
    params=PARAMS,
    want=want,
    resolve=resolve,
    bits=bits,
    changes_output=True,
    reads=frozenset(),
)
