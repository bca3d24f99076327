"""The few figures of a result that a driver compares as results come in; tables and plots derive theirs when read."""

from __future__ import annotations

from moereplay.results.result import Result
from moereplay.results.spent import spent

#: Figure -> 1 if larger is better, -1 if smaller is.
FIGURES: dict[str, int] = {
    "hit_rate": 1,
    "ttft_ms": -1,
    "tpot_ms": -1,
    "gb_moved": -1,
    "capacity_gb": -1,
    "mass_kept": 1,
    "choice_kept": 1,
}
Figures = dict[str, float]


def figures_of(result: Result) -> Figures:
    """Every figure that is defined: a mean of nothing is left out."""
    totals, (first, decode_ns, passes) = result.totals, spent(result.per_request)
    quotients = {
        "hit_rate": (totals["hits"], totals["accesses"]),
        "ttft_ms": (sum(first), len(first) * 10**6),
        "tpot_ms": (decode_ns, passes * 10**6),
        "gb_moved": (totals["bytes_demand"] + totals["bytes_prefetch"], 10**9),
        "capacity_gb": (result.about["capacity_bytes"], 10**9),
        "mass_kept": (totals["mass_kept"], totals["mass"]),
        "choice_kept": (totals["assignments_kept"], totals["assignments"]),
    }
    return {name: over / under for name, (over, under) in quotients.items() if under}
