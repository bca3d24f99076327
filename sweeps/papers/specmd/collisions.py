"""Collisions per miss of every eviction policy: which of them evicts what the same pass still needs."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, EVICTIONS, PANELS, settings
from moereplay.traces.schema import Trace

SOURCE = "§4.2, at 5 %"
COLUMN, AT = "collisions_per_miss", "capacity 5%"


def cells(trace: Trace) -> Iterator[Cell]:
    """Every eviction at every capacity, behind next-layer prefetch."""
    return grid(settings(trace), [(name, name, {"eviction": name}) for name in EVICTIONS], PANELS)


FIGURE = PaperFigure(
    name="collisions",
    where="Fig. 4",
    title="Collisions per miss of eviction policies",
    chart=Chart("bars", {COLUMN: "collisions per miss"}),
    cells=cells,
    assumed="Rates are read as per miss; the paper does not say of what.",
    throughout=ASSUMED,
    published=(
        Published(COLUMN, 0.016, 0.019, "least_stale", "least_stale", SOURCE, AT),
        Published(COLUMN, 0.045, 0.126, "lru", "lru", SOURCE, AT),
        Published(COLUMN, 0.426, 0.609, "score", "score", SOURCE, AT),
    ),
)
