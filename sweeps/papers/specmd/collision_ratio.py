"""How many times Least-Stale's collisions the others have."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, EVICTIONS, PANELS, settings
from moereplay.traces.schema import Trace

COLUMN, AT = "relative_collisions", "capacity 5%"


def cells(trace: Trace) -> Iterator[Cell]:
    """The same replays as those of the collisions themselves."""
    return grid(settings(trace), [(name, name, {"eviction": name}) for name in EVICTIONS], PANELS)


FIGURE = PaperFigure(
    name="collision_ratio",
    where="Fig. 8",
    title="Collisions, as multiples of Least-Stale's",
    chart=Chart("bars", {"collisions": "times Least-Stale's"}, relative_to="least_stale", log=True),
    cells=cells,
    assumed="Collisions are counted over the same accesses, not per miss.",
    throughout=ASSUMED,
    published=(
        Published(COLUMN, 2.6, 8.6, "lru", "lru", "Fig. 8 and its text, at 5 %", AT),
        Published(COLUMN, 58, 91, "score", "score", "Fig. 8's text, at 5 %; its rates allow 38 at most", AT),
        Published(COLUMN, 10, 85, "lru", "lru", "Fig. 8: 10 to 34; abstract: up to 85", "capacity 1%"),
    ),
)
