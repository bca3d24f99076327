"""Table 1: time to first token and tokens/s of the baseline and of the five configurations."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.simulator.config import configure
from moereplay.simulator.preset import preset
from moereplay.sweeps.papers.figure import Cell, PaperFigure, Published
from moereplay.traces.schema import Trace

NAMES = ("baseline", "#1", "#2", "#3", "#4", "#5")
#: TTFT in ms and tokens/s, in the order of NAMES.
PUBLISHED = {
    "olmoe-1b-7b": ((3166, 1.5), (3077, 1.91), (2257, 1.22), (1590, 1.34), (2665, 2.33), (2220, 1.69)),
    "mixtral-8x7b": ((10296, 0.4), (4238, 0.98), (1620, 0.75), (2322, 0.71), (4333, 1.07), (3044, 1.42)),
    "phi-3.5-moe": ((7902, 0.8), (4452, 1.69), (1906, 0.86), (3459, 1.05), (5025, 1.72), (3863, 1.11)),
    "qwen1.5-moe-a2.7b": ((5728, 2.3), (3724, 2.89), (2739, 1.11), (2492, 2.19), (3489, 3.5), (2893, 2.11)),
}


def cells(trace: Trace) -> Iterator[Cell]:
    """The presets as they are."""
    for name in NAMES:
        yield Cell(configure(**preset(f"specmd-{name.lstrip('#')}").values()), name, name)


def published() -> Iterator[Published]:
    """Two numbers of every row and model."""
    for model, rows in PUBLISHED.items():
        for name, (ttft, speed) in zip(NAMES, rows, strict=True):
            yield Published("ttft_mean_ms", ttft, ttft, name, name, "Table 1", model=model)
            yield Published("tokens_per_s", speed, speed, name, name, "Table 1", model=model)


FIGURE = PaperFigure(
    name="table_1",
    where="Table 1",
    title="Time to first token and tokens/s of SpecMD's configurations",
    chart=Chart("bars", {"ttft_mean_ms": "TTFT, ms", "tokens_per_s": "tokens/s"}, log=True),
    cells=cells,
    needs=frozenset({"lookahead"}),
    assumed="The presets have each value with its source. The paper's software adds 1 to 2.5 ms to each load "
    "of a small expert, which its platform here does not model, and its prompt lengths are unpublished: compare order, "
    "not milliseconds.",
    published=tuple(published()),
)
