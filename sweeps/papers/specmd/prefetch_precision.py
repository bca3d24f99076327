"""Precision of the prediction against hit rate: a fixed number of experts beside a threshold on their scores."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, PANELS, settings
from moereplay.traces.schema import Trace

FACTORS = (0.5, 1.0, 1.5, 2.0)
PERCENTILES = (95, 90, 80, 70)


def cells(trace: Trace) -> Iterator[Cell]:
    """From few prefetched experts to many."""
    fixed = [("top_k", factor, {"prefetch": f"top_k:factor={factor:g}"}) for factor in FACTORS]
    scored = [("score", percentile, {"prefetch": f"score:percentile={percentile}"}) for percentile in PERCENTILES]
    pooled = [
        ("score:pool=running", percentile, {"prefetch": f"score:percentile={percentile}:pool=running"})
        for percentile in PERCENTILES
    ]
    return grid(settings(trace), [*fixed, *scored, *pooled], PANELS)


FIGURE = PaperFigure(
    name="prefetch_precision",
    where="§3",
    title="Hit rate against the precision of prefetching",
    chart=Chart("lines", {"hit_rate": "hit rate"}, x_name="precision of the prediction", x="predictor_precision"),
    cells=cells,
    needs=frozenset({"lookahead"}),
    assumed="Whether a percentile is of one token's scores or of a running pool is not stated: both are replayed. "
    "Under LRU; top_k from .5 to 2 k, score from the 95th to the 70th percentile.",
    throughout=ASSUMED,
)
