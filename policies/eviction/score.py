"""Score-based: the expert with the smallest sum of gate weights so far leaves (SpecMD's reading of Zhu et al.)."""

from policies.contract import Eviction, always


def key(now, experts, copies, own, y):
    """The gate weight of all its assignments since the start, kept through evictions."""
    return experts[y // now["precisions"]]["mass_ever"]


POLICY = Eviction(
    name="score",
    summary="smallest accumulated gate weight leaves",
    source="SpecMD §4.1 (SB)",
    needs=always("weights"),
    key=key,
)
