"""Checked configurations of a sweep: times that were measured, or run live, beside the replay of the same tokens."""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from moereplay.analysis.checks import COLUMN, error_of
from moereplay.analysis.figures.facets import DIGEST, shared
from moereplay.analysis.figures.lines import axis_name, legend, spans_a_decade
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.metrics import measured
from moereplay.analysis.palette import MUTED, Look, looks
from moereplay.results.result import ResultError

OPTIONS: dict[str, tuple[str, ...]] = {}
LABELS = {"measured": "MEASURED beside SIMULATED", "live": "LIVE, emulated, beside SIMULATED"}
NOTE = (
    "A point for every checked configuration. Both times are of the same tokens and layers, a part of the trace; on "
    "the line the replay is right."
)


def draw(frame: pl.DataFrame) -> Figure:
    """Replayed over checked milliseconds, on the diagonal where they are equal; a look per eviction policy.

    Raises ResultError if nothing was checked, or nothing of it has a time.
    """
    figure, rows = _points(frame)
    drawn, ways = looks(rows["eviction"]), sorted(set(rows["way"]), reverse=True)
    name = figure.partition("_")[0].upper()
    title = f"{len(rows)} of {len(frame)} configurations checked"
    where = f"On {', '.join(sorted(set(rows['device'])))}"
    found = "; ".join(filter(None, (error_of(frame, each) for each in (figure, "hit_rate"))))
    label = " / ".join(LABELS[way] for way in ways)
    x, y = (axis_name(f"{side} {name}, ms", spans_a_decade(_times(rows))) for side in ("checked", "replayed"))
    wording = Wording(title, shared(rows), label, x, y, f"{NOTE} {where}: {found}.")
    sheet = Sheet(Grid([""], [""], (4.0, 4.0)), wording, legend(drawn))
    _draw(sheet.panels[0][0], rows, drawn)
    return sheet.figure


def _points(frame: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """The time that was checked, and a tidy row for each configuration that has it, with `checked` and `replayed`."""
    if COLUMN not in frame.columns:
        raise ResultError("none of these configurations was checked; `sweep run --every N` checks some")
    known = frame[COLUMN].struct.unnest()
    tidy = measured(frame).with_columns(pl.col("trace").str.head(DIGEST), known["way"], known["device"])
    for figure in ("tpot_ms", "ttft_ms"):
        sides = (known[f"{side}_{figure}"].alias(side) for side in ("checked", "replayed"))
        rows = tidy.with_columns(*sides).drop_nulls("checked")
        if not rows.is_empty():
            return figure, rows
    raise ResultError("what was checked of these configurations has no times; check requests that have a prompt")


def _times(rows: pl.DataFrame) -> list[float]:
    return [*rows["checked"], *rows["replayed"]]


def _draw(axes: Axes, rows: pl.DataFrame, drawn: dict[str, Look]) -> None:
    times = _times(rows)
    spread = max(times) - min(times) or max(times)
    logarithmic = spans_a_decade(times)
    ends = (min(times) / 1.2, max(times) * 1.2) if logarithmic else (min(times) - spread / 10, max(times) + spread / 10)
    axes.plot(ends, ends, color=MUTED, linewidth=0.8, zorder=0)
    for name, look in drawn.items():
        points = rows.filter(pl.col("eviction") == name)
        dots = {"linestyle": "none", "markersize": 6, "alpha": 0.8}
        axes.plot(points["checked"].to_numpy(), points["replayed"].to_numpy(), **(look.line() | dots))
    scale = "log" if logarithmic else "linear"
    axes.set(xscale=scale, yscale=scale, xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
