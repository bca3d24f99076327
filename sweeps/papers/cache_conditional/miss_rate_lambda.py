"""Misses against lambda, for each number of protected experts, beside LRU and Belady on the unmodified routing."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.cache_conditional_settings import ASSUMED, PANELS, ROUTING, settings
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.traces.schema import Trace

LAMBDAS = (*(step / 100 for step in range(0, 21, 2)), 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
PROTECTED = (0, 1, 2, 4)  #: J, the first experts of a token, which cache-prior always keeps
SOURCE = "first author's sweep, another model (Nemotron-3-Nano-30B-A3B, 128 experts)"
#: Miss rate by panel, J and lambda.
SWEEP = {
    ("E/4", 1): ((0.0505, 0.26069), (0.101, 0.20382), (0.1313, 0.17774), (0.202, 0.1339), (0.2929, 0.09925)),
    ("E/4", 2): ((0.101, 0.20568), (0.202, 0.14316)),
    ("E/4", 4): ((0.101, 0.23377), (0.202, 0.21151)),
    ("E/2", 1): ((0.101, 0.0838), (0.202, 0.0542), (0.404, 0.0324), (0.828, 0.0222)),
}
#: LRU and Belady, which have no lambda.
WITHOUT = {("E/4", "lru"): 0.33716, ("E/4", "belady"): 0.18126, ("E/2", "lru"): 0.1603}


def cells(trace: Trace) -> Iterator[Cell]:
    """LRU and its bound twice, so that they are lines."""
    plain = [("lru", lam, {"routing": "standard"}) for lam in (LAMBDAS[0], LAMBDAS[-1])]
    lifted = [(f"J = {j}", lam, {"routing": ROUTING.format(lam, j)}) for j in PROTECTED for lam in LAMBDAS]
    return grid(settings(), [*plain, *lifted], PANELS)


def published() -> Iterator[Published]:
    """The sweep's miss rates."""
    for (panel, j), points in SWEEP.items():
        for lam, missed in points:
            yield Published("miss_rate", missed, missed, f"J = {j}", lam, SOURCE, panel)
    for (panel, series), missed in WITHOUT.items():
        yield Published("miss_rate", missed, missed, series, 0.0, SOURCE, panel)


FIGURE = PaperFigure(
    name="miss_rate_lambda",
    where="eq. 9-10 and the author's sweep",
    title="Miss rate of cache-prior against lambda",
    chart=Chart("lines", {"miss_rate": "miss rate"}, x_name="lambda", bound=True),
    cells=cells,
    needs=frozenset({"logits"}),
    assumed="Belady cannot be beaten on a fixed demand; cache-prior changes the demand.",
    throughout=ASSUMED,
    published=tuple(published()),
)
