"""A page of a paper's figure: panels of bars or lines, published numbers as marks, and what they rest on below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from moereplay.analysis.figures.facets import DIGEST, shared
from moereplay.analysis.figures.lines import axis_name, from_zero, legend
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording, styled
from moereplay.analysis.palette import INK, Look, in_order
from moereplay.analysis.papers import bars, lines
from moereplay.results.chart import Chart
from moereplay.results.result import ResultError

MOST_PANELS = 24  #: of a page
#: Columns that are shares: their axes are in percent.
SHARES = (
    "hit_rate",
    "miss_rate",
    "collisions_per_miss",
    "mass_changed",
    "share",
    "predictor_precision",
    "mean_variation",
)
SIGNED = ("perplexity_change",)  #: in percent too, and may be below zero
#: Handles of published numbers, by the kind of chart.
PUBLISHED = {
    "bars": Line2D(
        [], [], color=INK, marker="_", markersize=9, markeredgewidth=1.6, linestyle="none", label="published"
    ),
    "lines": Line2D([], [], color=INK, marker="o", label="published", **lines.MARK),
}


@dataclass(frozen=True)
class Text:
    """The words of a page."""

    title: str
    note: str


def page(chart: Chart, text: Text, rows: pl.DataFrame, published: pl.DataFrame) -> Figure:
    """Panels for values, panels and traces. `rows` are of `rows_of`; `published` has value, low, high, and `PLACE`.

    Raises ResultError if nothing can be drawn, or more panels than a page holds.
    """
    drawn = {name: axis for name, axis in chart.drawn.items() if rows[name].drop_nulls().len()}
    if chart.live in rows.columns and rows[chart.live].drop_nulls().len():
        drawn[chart.live] = "change of perplexity, live"
    if not drawn:
        raise ResultError(f"nothing to draw: no replay has {', '.join(chart.drawn)}")
    shown = rows.filter(pl.col("series") != chart.relative_to) if chart.relative_to else rows
    with styled():
        return _drawn(chart, drawn, text, shown, published)


def _drawn(chart: Chart, drawn: dict[str, str], text: Text, rows: pl.DataFrame, published: pl.DataFrame) -> Figure:
    looks = in_order([*rows["series"]])
    plan = _layout(drawn, rows)
    size = (3.0, 2.3) if len(plan.columns) > 1 else (6.0, 3.4)
    grid = Grid(plan.columns, plan.rows, size, scales="columns" if len(drawn) > 1 else "one")
    y_name = "" if len(drawn) > 1 else next(iter(drawn.values()))
    marks = [_published_handle(chart, published)] if len(published) else []
    wording = Wording(
        text.title,
        _subtitle(rows),
        _label(rows),
        chart.x_name,
        axis_name(y_name, chart.log and bool(y_name)),
        text.note,
    )
    sheet = Sheet(grid, wording, [*_handles(chart, looks), *marks])
    for across, down, value, condition in plan.panels:
        axes, own = sheet.panels[down][across], rows.filter(condition)
        beside = published.filter(condition) if len(published) else published
        _panel(chart, axes, own, beside, value, looks)
        _scale(chart, axes, rows, value, published)
    return sheet.figure


@dataclass(frozen=True)
class Layout:
    """Titles of columns and rows, and of each panel: its column, its row, its value, and which rows it has."""

    columns: list[str]
    rows: list[str]
    panels: list[tuple[int, int, str, pl.Expr]]


def _layout(drawn: dict[str, str], rows: pl.DataFrame) -> Layout:
    """Several values stand side by side, above one another their panels; one value has its panels side by side."""
    traces, panels = _names(rows, "trace"), _names(rows, "panel")
    models = dict(zip(rows["trace"], rows["model"], strict=True))
    called = {each: f"{models[each]}, trace {each[:DIGEST]}" for each in traces}
    if len(drawn) == 1:
        (value,) = drawn
        places = [
            (across, down, value, (pl.col("trace") == trace) & (pl.col("panel") == panel))
            for down, trace in enumerate(traces)
            for across, panel in enumerate(panels)
        ]
        return _checked(Layout(panels, [called[each] for each in traces], places))
    pairs = [(trace, panel) for trace in traces for panel in panels]
    places = [
        (across, down, value, (pl.col("trace") == trace) & (pl.col("panel") == panel))
        for down, (trace, panel) in enumerate(pairs)
        for across, value in enumerate(drawn)
    ]
    headings = [", ".join(filter(None, (called[trace], panel))) for trace, panel in pairs]
    return _checked(Layout(list(drawn.values()), headings, places))


def _checked(layout: Layout) -> Layout:
    if len(layout.panels) > MOST_PANELS:
        raise ResultError(f"{len(layout.panels)} panels do not fit a page of {MOST_PANELS}; name fewer traces")
    return layout


def _names(rows: pl.DataFrame, column: str) -> list[str]:
    return rows[column].unique(maintain_order=True).to_list()


def _subtitle(rows: pl.DataFrame) -> str:
    return shared(rows.with_columns(pl.col("trace").str.head(DIGEST)))


def _label(rows: pl.DataFrame) -> str:
    return " / ".join(sorted(set(rows["label"])))


def _handles(chart: Chart, looks: dict[str, Look]) -> Sequence[Artist]:
    return bars.legend(looks) if chart.kind == "bars" else legend(looks)


def _published_handle(chart: Chart, published: pl.DataFrame) -> Artist:
    """What a published number looks like: of the horizontal axis a band."""
    if (published["value"] == chart.x).all():
        return Patch(facecolor=INK, alpha=0.15, label="published")
    return PUBLISHED[chart.kind]


def _panel(
    chart: Chart, axes: Axes, rows: pl.DataFrame, published: pl.DataFrame, value: str, looks: dict[str, Look]
) -> None:
    if chart.kind == "bars":
        bars.draw(axes, rows, published, value, looks)
    else:
        lines.draw(axes, rows, published, value, chart.x, looks)


def _scale(chart: Chart, axes: Axes, rows: pl.DataFrame, value: str, published: pl.DataFrame) -> None:
    if chart.kind == "lines":
        _along(chart, axes)
    highest = max([*rows[value].drop_nulls(), *_published_of(published, value)], default=0.0)
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    elif value in SHARES:
        from_zero(axes, highest)
    elif value in SIGNED:
        axes.yaxis.set_major_formatter(_PERCENT)
    else:
        axes.set_ylim(0, 1.1 * highest or 1)


def _along(chart: Chart, axes: Axes) -> None:
    if chart.per == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif chart.per == "lifetime":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    elif chart.x in SHARES:
        axes.xaxis.set_major_formatter(_PERCENT)


def _published_of(published: pl.DataFrame, value: str) -> list[float]:
    return published.filter(pl.col("value") == value)["high"].to_list() if len(published) else []


_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")
