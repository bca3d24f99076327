"""Table 2: what Least-Stale in place of a configuration's own eviction does to the time to first token."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.simulator.config import configure
from moereplay.simulator.preset import LEAST_STALE, preset
from moereplay.sweeps.papers.figure import PROMPTS, Cell, PaperFigure, Published
from moereplay.traces.schema import Trace

PRESETS = ("specmd-1", "specmd-2", "specmd-3", "specmd-4")
NAMES = {"specmd-1": "Eliseev", "specmd-2": "Zhu", "specmd-3": "HOBBIT", "specmd-4": "MixtureCache"}
OWN, CHANGED = "own eviction", "least_stale"
#: TTFT in ms of each preset as it is, and with Least-Stale.
PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "olmoe-1b-7b": ((3076.8, 2748.1), (2257.2, 1473.1), (1590.1, 1309.2), (2664.6, 2297.5)),
    "mixtral-8x7b": ((4238.0, 3485.2), (1620.3, 1460.8), (2321.7, 1725.2), (4332.6, 3573.2)),
    "phi-3.5-moe": ((4451.7, 3791.1), (1905.6, 1987.6), (3458.6, 1933.6), (5025.3, 3791.1)),
    "qwen1.5-moe-a2.7b": ((3724.0, 3433.4), (2739.2, 2620.9), (2492.0, 2033.7), (3488.6, 2685.4)),
}


def cells(trace: Trace) -> Iterator[Cell]:
    """Every preset twice."""
    for name in PRESETS:
        yield Cell(configure(**preset(name).values()), OWN, NAMES[name])
        yield Cell(configure(**preset(name + LEAST_STALE).values()), CHANGED, NAMES[name])


def published() -> Iterator[Published]:
    """The quotient of each pair, as milliseconds cannot be compared."""
    for model, pairs in PUBLISHED.items():
        for name, (before, after) in zip(PRESETS, pairs, strict=True):
            yield Published(
                "relative_ttft_mean_ms", after / before, after / before, CHANGED, NAMES[name], "Table 2", model=model
            )


FIGURE = PaperFigure(
    name="table_2",
    where="Table 2",
    title="TTFT with Least-Stale over TTFT with the configuration's own eviction",
    chart=Chart("bars", {"ttft_mean_ms": "TTFT, as a multiple of that of its own eviction"}, relative_to=OWN),
    cells=cells,
    needs=frozenset({"lookahead", PROMPTS}),
    assumed="Below 1 Least-Stale is faster. 5 % is of 16-bit bytes; `make study-readings` tries others.",
    published=tuple(published()),
)
