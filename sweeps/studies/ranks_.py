"""Which ranks a model can do without: each in turn replaced by a random expert, or left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moereplay.sweeps.studies.study import Study
from moereplay.traces.schema import Geometry


def sets(geometry: Geometry) -> Mapping[str, Mapping[str, Any]]:
    """Rank 1 to k."""
    ranks = range(1, geometry.k + 1)
    return {
        "swap": {"routing": [f"swap:rank={rank}" for rank in ranks]},
        "prune_rank": {"routing": [f"prune_rank:rank={rank}" for rank in ranks]},
    }


STUDY = Study(
    summary="each rank in turn replaced by a random expert, or left out",
    source="arXiv 2412.00099, sensitivity to ranks",
    capacity="100%",
    sets=sets,
)
