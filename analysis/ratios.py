"""What is derived from counters: ratios of sums, each defined once, and what the documentation says of the others.

A ratio whose denominator is zero is null, never zero or infinite. `analysis/metrics.py` has them over frames,
`analysis/ranking.py` for the table that a replay prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """A sum of counters over a sum of counters."""

    over: tuple[str, ...]
    under: tuple[str, ...]

    @property
    def formula(self) -> str:
        """The ratio as text, for documentation: hits / accesses."""
        parts = [" + ".join(side) for side in (self.over, self.under)]
        return " / ".join(f"({part})" if "+" in part else part for part in parts)

    def of(self, counters: Mapping[str, int | None]) -> float | None:
        """Of one configuration's counters; None where one is missing or the denominator is zero."""
        over, under = ([counters.get(name) for name in side] for side in (self.over, self.under))
        return quotient(_total(over), _total(under))


#: Ratios of totals, of a layer or of a request: every tidy frame with these columns can have them.
RATIOS: dict[str, Ratio] = {
    "hit_rate": Ratio(("hits",), ("accesses",)),
    "late_rate": Ratio(("late",), ("accesses",)),
    "collisions_per_miss": Ratio(("collisions",), ("misses",)),
    "collisions_per_access": Ratio(("collisions",), ("accesses",)),
    "prefetch_precision": Ratio(("prefetch_used",), ("prefetch_started",)),
    "prefetch_recall": Ratio(("prefetch_used",), ("prefetch_used", "misses")),
    "predictor_precision": Ratio(("predicted_demanded",), ("predicted",)),
    "predictor_recall": Ratio(("predicted_demanded",), ("predictable",)),
    "wasted_share": Ratio(("bytes_wasted",), ("bytes_prefetch",)),
    "choice_kept": Ratio(("assignments_kept",), ("assignments",)),
    "mass_share_kept": Ratio(("mass_kept",), ("mass",)),
    "mass_share_substituted": Ratio(("mass_substituted",), ("mass",)),
    "mass_share_dropped": Ratio(("mass_dropped",), ("mass",)),
    "mass_share_low_precision": Ratio(("mass_low_precision",), ("mass",)),
    "mean_displacement": Ratio(("rank_displacement",), ("assignments",)),
    "mean_variation": Ratio(("variation",), ("mass",)),
    "stall_share": Ratio(("stall_ns",), ("time_ns",)),
    "belady_hit_rate": Ratio(("bound_belady_hits",), ("bound_accesses",)),
}
#: As papers state it; late accesses are none of it. Without prefetch it is 1 - hit rate.
MISS_RATE = Ratio(("misses",), ("accesses",))
#: Metrics that are no plain ratio of sums, for the same documentation.
FORMULAS: dict[str, str] = {name: ratio.formula for name, ratio in RATIOS.items()} | {
    "compulsory_limit": "1 - bound_compulsory / bound_accesses: no cache without prefetch hits more",
    "ttft_mean_ms": "mean over requests of request start to the end of its prefill",
    "ttft_median_ms": "median over requests of the same",
    "tpot_ms": "sum of decode_ns / sum of decode_passes, over requests",
    "tokens_per_s": "sum of decode_passes / sum of decode_ns: the speed that a request sees, one token per pass",
    "gb_moved": "(bytes_demand + bytes_prefetch) / 1e9",
    "gb_lower": "bytes_lower / 1e9: what platforms with more than two tiers read into those below the fast one",
}
#: The numbers of the ranking, best first when sorted in this direction: True is "larger is better".
RANKED: dict[str, bool] = {
    "hit_rate": True,
    "belady_hit_rate": True,
    "compulsory_limit": True,
    "collisions_per_miss": False,
    "ttft_mean_ms": False,
    "tpot_ms": False,
    "tokens_per_s": True,
    "gb_moved": False,
}


def quotient(over: float | None, under: float | None) -> float | None:
    """None where either is unknown or the denominator is zero."""
    return None if over is None or not under else over / under


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
