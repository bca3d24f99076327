"""Misses against what they cost in quality: cache-prior, max-rank, cumulative threshold and pruning, beside Belady."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.cache_conditional_settings import ASSUMED, CHANGED, PANELS, PERPLEXITY, ROUTING, settings
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published, grid
from moereplay.traces.schema import Trace

LAMBDAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SOURCE = "abstract and results, as quoted by re-implementations; C = E/2"
#: Misses of LRU, and with cache-prior.
HEADLINE = {"qwen1.5-moe-a2.7b": (0.35, 0.16), "deepseek-v2-lite": (0.28, 0.07), "phi-3.5-moe": (0.22, 0.09)}


def cells(trace: Trace) -> Iterator[Cell]:
    """Every method along its parameter, from what changes nothing to what changes most."""
    k, experts = trace.geometry.k, trace.geometry.experts
    prior = [("cache_prior", lam, {"routing": ROUTING.format(lam, -1)}) for lam in LAMBDAS]
    ranks = [("max_rank", m, {"routing": f"max_rank:m={m}"}) for m in windows(k, experts)]
    shares = [("cumulative", p, {"routing": f"cumulative:p={p:g}"}) for p in SHARES]
    pruned = [("prune", keep, {"routing": f"prune:keep={keep}"}) for keep in range(k - 1, 0, -1)]
    return grid(settings(), [("lru", 0, {"routing": "standard"}), *prior, *ranks, *shares, *pruned], PANELS)


def windows(k: int, experts: int) -> list[int]:
    """Ranks to consider: from k, each half as many again, to all experts."""
    found = [k]
    while found[-1] < experts:
        found.append(min(experts, max(found[-1] + 1, found[-1] * 3 // 2)))
    return found


def published() -> Iterator[Published]:
    """The headline of three models; what it costs in gate mass is not published."""
    for model, (lru, prior) in HEADLINE.items():
        yield Published("miss_rate", lru, lru, "lru", 0, SOURCE, "E/2", model)
        yield Published("miss_rate", prior, prior, "cache_prior", 0, SOURCE, "E/2", model)


FIGURE = PaperFigure(
    name="miss_rate_quality",
    where="miss rate against perplexity",
    title="Gate mass changed against miss rate",
    chart=Chart(
        "lines", {CHANGED: "gate mass changed"}, x_name="miss rate", x="miss_rate", bound=True, live=PERPLEXITY
    ),
    cells=cells,
    needs=frozenset({"logits"}),
    assumed="The parameters' grids are ours. Pruning runs fewer experts, so it misses less per token.",
    throughout=ASSUMED,
    published=tuple(published()),
)
