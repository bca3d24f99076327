"""What fewer misses cost: each cache-aware routing policy over its parameter, beside plain LRU and Belady's bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moereplay.sweeps.studies.study import Study
from moereplay.traces.schema import Geometry

LAMBDAS = (0.05, 0.1, 0.25, 0.5, 0.75, 1)
MASSES = (0.5, 0.7, 0.8, 0.9, 0.95)
#: Of the experts beyond k, how many may be chosen from.
BEYOND = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


def sets(geometry: Geometry) -> Mapping[str, Mapping[str, Any]]:
    """Ranks from which max_rank chooses go from a few more than k to all."""
    k, more = geometry.k, geometry.experts - geometry.k
    ranks = sorted({k + max(1, round(share * more)) for share in BEYOND}) if more else [k]
    return {
        "lru": {},
        "cache_prior": {"routing": [f"cache_prior:lam={lam:g}" for lam in LAMBDAS]},
        "max_rank": {"routing": [f"max_rank:m={rank}" for rank in ranks]},
        "cumulative": {"routing": [f"cumulative:p={mass:g}" for mass in MASSES]},
    }


STUDY = Study(
    summary="miss rate and quality of cache_prior, max_rank and cumulative over their parameters",
    source="arXiv 2412.00099, miss rate against quality",
    capacity="50%",
    sets=sets,
)
