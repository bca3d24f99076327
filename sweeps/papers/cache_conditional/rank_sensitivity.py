"""What replacing each token's i-th expert by one that was not chosen takes from the mixture."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.cache_conditional_settings import ASSUMED, PERPLEXITY, settings
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.traces.schema import Trace


def cells(trace: Trace) -> Iterator[Cell]:
    """Every rank, replaced by a random expert and by the best that was not chosen."""
    changes = [
        (f"by {word}", rank, {"routing": f"swap:rank={rank}:by={by}"})
        for word, by in (("a random expert", "random"), ("the next best", "next"))
        for rank in range(1, trace.geometry.k + 1)
    ]
    return grid(settings(), changes, {"": {}})


FIGURE = PaperFigure(
    name="rank_sensitivity",
    where="sensitivity to replaced ranks",
    title="The mixture changed by replacing the expert of one rank",
    chart=Chart(
        "lines",
        {"mean_variation": "share of the mixture that differs"},
        x_name="rank of the replaced expert",
        live=PERPLEXITY,
    ),
    cells=cells,
    needs=frozenset({"logits"}),
    assumed="The paper does not say by which expert: a random one, or the best that was not chosen. Shares: half "
    "the sum of |w - w'|.",
    throughout=ASSUMED,
)
