"""What fetching more of the predicted experts than k buys, beside a threshold on their scores."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, PANELS, settings
from moereplay.traces.schema import Trace

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  #: of k
EVICTIONS = ("lru", "least_stale")


def cells(trace: Trace) -> Iterator[Cell]:
    """Every factor under both evictions."""
    changes = [
        (eviction, factor, {"eviction": eviction, "prefetch": f"top_k:factor={factor:g}"})
        for eviction in EVICTIONS
        for factor in FACTORS
    ]
    return grid(settings(trace), changes, PANELS)


FIGURE = PaperFigure(
    name="overfetch",
    where="§3",
    title="Hit rate against overfetch",
    chart=Chart("lines", {"hit_rate": "hit rate"}, x_name="experts prefetched per layer, as a multiple of k"),
    cells=cells,
    needs=frozenset({"lookahead"}),
    assumed="Rounding is not stated: factor x k is rounded up.",
    throughout=ASSUMED,
)
