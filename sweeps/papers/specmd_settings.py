"""What SpecMD's figures share: configuration 1 of its Table 1, with experts as they are stored."""

from __future__ import annotations

from moereplay.simulator.preset import preset
from moereplay.sweeps.papers.figure import predictor
from moereplay.traces.schema import Trace

CAPACITIES = ("1%", "5%", "25%")  #: of all expert bytes (§5)
PANELS = {f"capacity {each}": {"capacity": each} for each in CAPACITIES}
#: Eviction policies, and their spelling here: both readings of farthest layer, three of Least-Stale.
EVICTIONS = (
    "least_stale",
    "least_stale:order=b",
    "least_stale:order=a",
    "lru",
    "lfu:count=history",
    "score",
    "farthest_layer",
    "farthest_layer:distance=absolute",
)
ASSUMED = (
    "The paper does not say at which precision its figures of policies were made: experts are as the trace stores "
    "them. Where it has no look-ahead, an oracle of recall and precision .87 stands for the next layer's gate."
)


def settings(trace: Trace) -> dict[str, str]:
    """Settings of a replay: the preset's, with next-layer prefetch as far as this trace allows it."""
    return preset("specmd-1").values() | {"miss": "fetch", "capacity": "5%", "prefetch": predictor(trace)}
