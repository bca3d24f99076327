"""How much a search by replays tries: everything that a minute allows, or what answers in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Sizes of the parts of a search."""

    judged: int | None  #: accesses of the requests that figures are of; None: of all
    screened: int | None  #: accesses of the requests on which sets are ranked; None: a million
    kept: int  #: evictions (with scope) that pass from the first round to the second
    caches: int | None  #: evictions that later rounds try again, None for all
    finalists: int  #: sets replayed on all requests, and half as many of each kind for comparison
    leading: int  #: of those, from which every size of the memory takes the fastest
    shares: tuple[float, ...]  #: of the cache, in the curve over memory
    recalls: tuple[float, ...]  #: of a predictor, rising, at which prefetching is tried
    bounded: bool  #: whether a prefetch of perfect knowledge decides if prefetching is searched


THOROUGH = Pace(
    judged=None,
    screened=None,
    kept=4,
    caches=None,
    finalists=6,
    leading=4,
    shares=(0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
    recalls=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    bounded=False,
)
QUICK = Pace(
    judged=300_000,
    screened=60_000,
    kept=2,
    caches=4,
    finalists=4,
    leading=1,
    shares=(0.5, 0.75, 1.0, 1.5, 2.0),
    recalls=(0.5, 0.75, 1.0),
    bounded=True,
)
