"""Drop: a missing expert of rank beyond `keep` is skipped; the better ranked are always fetched."""

from moereplay.policies.contract import DROP, Miss, Number, slot

PARAMS = (Number("keep", 2, 0, 64, integer=True),)
KEEP = slot(PARAMS, "keep")


def resolve(now, step, experts, copies, own, missing, free, verdict):
    """Drop by the best rank over the pass's tokens (rank 0 is the router's first)."""
    for m in range(len(missing)):
        verdict[m] = 0 if step.rank[missing[m]] < own.par[KEEP] else DROP


POLICY = Miss(
    name="drop",
    summary="skip a miss beyond rank keep",
    source="SpecMD §3.1.2 Drop",
    params=PARAMS,
    resolve=resolve,
    changes_output=True,
    reads=frozenset({"rank"}),
)
