"""How long evicted copies had stayed: whether a policy evicts what is stale or what the same pass has just used."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, PANELS, settings
from moereplay.traces.schema import Trace

EVICTIONS = ("least_stale", "lru", "lfu:count=history", "score")


def cells(trace: Trace) -> Iterator[Cell]:
    """Lifetimes are the axis; a cell has all of them."""
    return grid(settings(trace), [(name, name, {"eviction": name}) for name in EVICTIONS], PANELS)


FIGURE = PaperFigure(
    name="eviction_age",
    where="Fig. 9",
    title="Lifetime of evicted copies",
    chart=Chart("lines", {"share": "share of evicted copies"}, x_name="stayed less than, passes (log)", per="lifetime"),
    cells=cells,
    assumed="The paper's figure illustrates that Least-Stale evicts stale experts of passed layers only; this one "
    "counts how long evicted copies had been resident, below one pass: within the pass that fetched them.",
    throughout=ASSUMED,
)
