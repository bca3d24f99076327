"""Tokens per second on a phone: cache-prior over LRU."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.cache_conditional_settings import ASSUMED, PANELS, ROUTING, settings
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.traces.schema import Trace

LAMBDAS = (0.1, 0.2, 0.5)
COLUMN, FASTEST = "relative_tokens_per_s", "cache_prior lam=0.5"


def cells(trace: Trace) -> Iterator[Cell]:
    """LRU is what the others are divided by."""
    prior = [(f"cache_prior lam={lam:g}", {"routing": ROUTING.format(lam, -1)}) for lam in LAMBDAS]
    return grid(settings(), [(name, name, own) for name, own in (("lru", {"routing": "standard"}), *prior)], PANELS)


FIGURE = PaperFigure(
    name="device",
    where="on-device results",
    title="Tokens/s on a phone, as multiples of LRU's",
    chart=Chart("bars", {"tokens_per_s": "times LRU's tokens/s"}, relative_to="lru"),
    cells=cells,
    needs=frozenset({"logits"}),
    assumed="The paper's two phones, their flash and cache sizes are not known here: moereplay's phone-ufs4.",
    throughout=ASSUMED,
    published=(Published(COLUMN, 1, 2, FASTEST, FASTEST, "abstract: up to 2 times, lambda not said", "E/2"),),
)
