"""How long experts stay in the cache: what cache-aware routing keeps is kept for longer."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.cache_conditional_settings import ASSUMED, PANELS, ROUTING, settings
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.traces.schema import Trace

WAYS = {
    "lru": "standard",
    "max_rank": "max_rank",
    "cumulative": "cumulative:p=0.7",
    "cache_prior lam=.1": ROUTING.format(0.1, -1),
    "cache_prior lam=.5": ROUTING.format(0.5, -1),
}


def cells(trace: Trace) -> Iterator[Cell]:
    """Lifetimes are the axis; a cell has all of them."""
    return grid(settings(), [(name, name, {"routing": routing}) for name, routing in WAYS.items()], PANELS)


FIGURE = PaperFigure(
    name="lifetimes",
    where="lifetime of experts",
    title="Lifetime of experts in the cache",
    chart=Chart("lines", {"share": "share of evicted copies"}, x_name="stayed less than, tokens (log)", per="lifetime"),
    cells=cells,
    assumed="Of evicted copies alone, in buckets of doubling length; those that a reset or the end removes are not "
    "counted, and copies that are never evicted live longer.",
    throughout=ASSUMED,
)
