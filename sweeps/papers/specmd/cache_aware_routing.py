"""What routing towards cached experts buys, and what of the mixture it changes."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.simulator.preset import preset
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.sweeps.papers.specmd_settings import PANELS
from moereplay.traces.schema import Trace

LAMBDAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
EVICTIONS = ("lru", "least_stale")


def cells(trace: Trace) -> Iterator[Cell]:
    """Configuration 4 of Table 1 at every lambda, with its own eviction and with Least-Stale."""
    base = preset("specmd-4").values() | {"miss": "fetch"}
    changes = [
        (name, lam, {"eviction": name, "routing": f"cache_prior:lam={lam:g}:top_j=0"})
        for name in EVICTIONS
        for lam in LAMBDAS
    ]
    return grid(base, changes, PANELS)


FIGURE = PaperFigure(
    name="cache_aware_routing",
    where="§5.1",
    title="Hit rate against lambda of cache-aware routing",
    chart=Chart("lines", {"hit_rate": "hit rate"}, x_name="lambda"),
    cells=cells,
    needs=frozenset({"logits"}),
    assumed="No prefetch, as in configuration 4, and none of a token's own experts protected, as in the paper's eq. 1. "
    "Open loop: recorded logits do not react. The paper calls .1 to .5 best.",
)
