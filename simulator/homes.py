"""Which expert lies behind which link: a layer's experts, in order of their ids, are dealt out in contiguous runs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor


def homes(experts: int, shares: Sequence[float]) -> tuple[int, ...]:
    """The link of each expert of a layer, by its number in the layer. `shares` are of each link, in any unit.

    The runs are as long as the shares say, by largest remainder: every link gets the whole part of its quota, and what
    is left goes one each to the largest fractions, of equal ones to the lower link.
    """
    exact = [Fraction(str(share)) for share in shares]
    quotas = [experts * share / sum(exact) for share in exact]
    runs = [floor(quota) for quota in quotas]
    by_fraction = sorted(range(len(quotas)), key=lambda link: (runs[link] - quotas[link], link))
    for link in by_fraction[: experts - sum(runs)]:
        runs[link] += 1
    return tuple(link for link, run in enumerate(runs) for _ in range(run))
