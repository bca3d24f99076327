"""Collisions per miss by layer: where in the model they happen."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, PANELS, settings
from moereplay.traces.schema import Trace

EVICTIONS = ("least_stale", "lru", "lfu:count=history", "score", "farthest_layer")


def cells(trace: Trace) -> Iterator[Cell]:
    """The layer is the axis; a cell has all of them."""
    return grid(settings(trace), [(name, name, {"eviction": name}) for name in EVICTIONS], PANELS)


FIGURE = PaperFigure(
    name="collisions_by_layer",
    where="Fig. 5",
    title="Collisions per miss by layer",
    chart=Chart("lines", {"collisions_per_miss": "collisions per miss"}, x_name="MoE layer", per="layer"),
    cells=cells,
    assumed="Prefill and decode passes, summed.",
    throughout=ASSUMED,
)
