"""Hit rate of every eviction policy behind next-layer prefetch."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, EVICTIONS, PANELS, settings
from moereplay.traces.schema import Trace


def cells(trace: Trace) -> Iterator[Cell]:
    """The same replays as those of the collisions."""
    return grid(settings(trace), [(name, name, {"eviction": name}) for name in EVICTIONS], PANELS)


FIGURE = PaperFigure(
    name="hit_rate",
    where="§4.2",
    title="Hit rate of eviction policies",
    chart=Chart("bars", {"hit_rate": "hit rate"}),
    cells=cells,
    assumed="An expert in flight at look-up is no hit; the paper does not say.",
    throughout=ASSUMED,
    published=(
        Published("hit_rate", 0.88, 0.92, "least_stale", "least_stale", "abstract and §4.2, at 5 %", "capacity 5%"),
    ),
)
