"""Misses against the size of the cache, beside Belady."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.cache_conditional_settings import ASSUMED, ROUTING, settings
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.traces.schema import Trace

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
WAYS = {
    "lru": "standard",
    "max_rank": "max_rank",
    "cumulative": "cumulative:p=0.7",
    "cache_prior lam=.1": ROUTING.format(0.1, 1),
    "cache_prior lam=.2": ROUTING.format(0.2, 1),
}
SOURCE = "first author's sweep, another model (Nemotron-3-Nano-30B-A3B, 128 experts), J = 1"
SIZES = (12, 16, 24, 32, 64)  #: of 128 experts in each layer
SWEEP = {
    "lru": (0.538, 0.4828, 0.4007, 0.33716, 0.1603),
    "cache_prior lam=.1": (0.3803, 0.3268, 0.2548, 0.20382, 0.0838),
    "cache_prior lam=.2": (0.2645, 0.2232, 0.1702, 0.1339, 0.0542),
}


def cells(trace: Trace) -> Iterator[Cell]:
    """Every method at every size, in experts of each layer."""
    experts = trace.geometry.experts
    sizes = sorted({max(1, round(share * experts)) for share in SHARES})
    changes = [
        (name, 100 * size / experts, {"routing": routing, "capacity": f"{size}/layer"})
        for name, routing in WAYS.items()
        for size in sizes
    ]
    return grid(settings(), changes, {"": {}})


def published() -> Iterator[Published]:
    """The sweep's miss rates, and Belady's at a quarter."""
    for series, rates in SWEEP.items():
        for size, rate in zip(SIZES, rates, strict=True):
            yield Published("miss_rate", rate, rate, series, 100 * size / 128, SOURCE)
    yield Published("miss_rate", 0.18126, 0.18126, "belady", 25.0, SOURCE)


FIGURE = PaperFigure(
    name="cache_size",
    where="miss rate against cache size",
    title="Miss rate against the size of the cache",
    chart=Chart("lines", {"miss_rate": "miss rate"}, x_name="cached experts of each layer, %", bound=True),
    cells=cells,
    assumed="J = 1 as in the author's sweep; the other parameters are the policies' defaults.",
    throughout=ASSUMED,
    published=tuple(published()),
)
