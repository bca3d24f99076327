"""Speed against what of the mixture is kept, by what becomes of a miss."""

from __future__ import annotations

from collections.abc import Iterator

from moereplay.results.chart import Chart
from moereplay.sweeps.papers.figure import Cell, PaperFigure, grid
from moereplay.sweeps.papers.specmd_settings import ASSUMED, PANELS, settings
from moereplay.traces.schema import Trace

WAYS = {
    "fetch": "fetch",
    "lowest bit": "lowest_bit",
    "cascade": "cascade",
    "drop": "drop:keep=2",
    "drop cascade": "drop_cascade",
    "substitute": "substitute",
}


def cells(trace: Trace) -> Iterator[Cell]:
    """Fetch at full precision, and what SpecMD's section 5.4 lays beside it."""
    changes = [(name, name, {"miss": spelled}) for name, spelled in WAYS.items()]
    return grid(settings(trace), changes, PANELS)


FIGURE = PaperFigure(
    name="miss_handling",
    where="§5.4",
    title="Speed against gate mass that is not executed as chosen",
    chart=Chart("lines", {"tokens_per_s": "tokens/s"}, x_name="gate mass changed (open-loop proxy)", x="mass_changed"),
    cells=cells,
    needs=frozenset({"weights", "decode"}),
    assumed="The paper has accuracies of live models; here the gate mass that is dropped, substituted or executed "
    "below the highest precision stands for them, an open-loop proxy. Tolerance and thresholds are unpublished: the "
    "policies' defaults.",
    throughout=ASSUMED,
)
