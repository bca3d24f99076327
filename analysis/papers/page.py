"""Pages of a paper's figures: panels of bars or lines, published numbers as marks, and notes below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from moereplay.analysis.figures import chart as charts
from moereplay.analysis.figures.chart import LETTER
from moereplay.analysis.figures.drawing import Sheet, from_zero, name_hidden, styled
from moereplay.analysis.figures.facets import shared
from moereplay.analysis.palette import COLLISION, INK, LIMIT, Look, in_order
from moereplay.analysis.tables import DIGITS
from moereplay.results.chart import BOUND, Chart
from moereplay.results.errors import ResultError
from moereplay.results.remarks import one_label

MOST_PANELS = 24  #: on a page
#: Columns that are shares, with axes in percent.
SHARES = (
    "hit_rate",
    "miss_rate",
    "collisions_per_miss",
    "mass_changed",
    "share",
    "predictor_precision",
    "predictor_recall",
    "stall_share",
    "mean_variation",
)
SIGNED = ("perplexity_change",)  #: shares that can be negative
MARK: dict[str, Any] = {"markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.4, "linestyle": "none"}
#: Legend entries of published numbers, by the kind of chart.
PUBLISHED = {
    "bars": Line2D(
        [], [], color=INK, marker="_", markersize=9, markeredgewidth=1.6, linestyle="none", label="published"
    ),
    "lines": Line2D([], [], color=INK, marker="o", label="published", **MARK),
}


@dataclass(frozen=True)
class Text:
    """Title and note of a page."""

    title: str
    note: str


def page(chart: Chart, text: Text, rows: pl.DataFrame, published: pl.DataFrame) -> Figure:
    """Draw panels for values, panels and traces. `rows` come from `rows_of`; `published` has value, low, high, and
    `PLACE`.

    Raises ResultError if nothing can be drawn, or the panels do not fit a page.
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
    names = _names(rows, "x") if chart.kind == "bars" else []
    longest = max((len(line) for name in names for line in _split(name).split("\n")), default=0)
    y_name = "" if len(drawn) > 1 else next(iter(drawn.values()))
    empty = charts.Chart(
        title=text.title,
        subtitle=shared(rows.with_columns(pl.col("trace").str.head(DIGITS))),
        label=one_label(rows["label"]),
        note=text.note,
        x=charts.Axis(chart.x_name),
        y=charts.Axis(y_name, scale="log" if chart.log else "linear"),
        columns=plan.columns,
        rows=plan.rows,
        size=(3.0, 2.3) if len(plan.columns) > 1 else (6.0, 3.4),
        scales="columns" if len(drawn) > 1 else "one",
        below=0.0 if _fit(names) else longest * NAME_SIZE * LETTER,
    )
    handles = [*_handles(chart, looks)]
    if len(published):  # a band, if the numbers belong to the horizontal axis
        band = Patch(facecolor=INK, alpha=0.15, label="published")
        handles.append(band if (published["value"] == chart.x).all() else PUBLISHED[chart.kind])
    sheet = Sheet(empty, handles)
    for across, down, value, condition in plan.panels:
        axes, own = sheet.panels[down][across], rows.filter(condition)
        beside = published.filter(condition) if len(published) else published
        _panel(chart, axes, own, beside, value, looks)
        _scale(chart, axes, rows, value, published)
        if chart.kind == "lines":
            known = own.filter((pl.col("series") != BOUND) | (chart.x == "x")).drop_nulls([chart.x])
            drawn_lines = {
                name: known.filter(series=name).select(chart.x, value).rows() for name in _names(known, "series")
            }
            name_hidden(axes, drawn_lines)
    return sheet.figure


@dataclass(frozen=True)
class Layout:
    """Titles of columns and rows, and column, row, value and condition of each panel."""

    columns: list[str]
    rows: list[str]
    panels: list[tuple[int, int, str, pl.Expr]]


def _layout(drawn: dict[str, str], rows: pl.DataFrame) -> Layout:
    """Put several values side by side and their panels below one another; put panels of a single value side by side."""
    traces, panels = _names(rows, "trace"), _names(rows, "panel")
    models = dict(zip(rows["trace"], rows["model"], strict=True))
    titles = {each: f"{models[each]}, trace {each[:DIGITS]}" for each in traces}
    if len(drawn) == 1:
        (value,) = drawn
        places = [
            (across, down, value, (pl.col("trace") == trace) & (pl.col("panel") == panel))
            for down, trace in enumerate(traces)
            for across, panel in enumerate(panels)
        ]
        return _checked(Layout(panels, [titles[each] for each in traces], places))
    pairs = [(trace, panel) for trace in traces for panel in panels]
    places = [
        (across, down, value, (pl.col("trace") == trace) & (pl.col("panel") == panel))
        for down, (trace, panel) in enumerate(pairs)
        for across, value in enumerate(drawn)
    ]
    headings = [", ".join(filter(None, (titles[trace], panel))) for trace, panel in pairs]
    return _checked(Layout(list(drawn.values()), headings, places))


def _checked(layout: Layout) -> Layout:
    if len(layout.panels) > MOST_PANELS:
        raise ResultError(f"{len(layout.panels)} panels do not fit a page of {MOST_PANELS}; pass fewer traces")
    return layout


def _names(rows: pl.DataFrame, column: str) -> list[str]:
    return rows[column].unique(maintain_order=True).to_list()


def _handles(chart: Chart, looks: dict[str, Look]) -> Sequence[Artist]:
    if chart.part:
        whole = next(iter(chart.values.values()))
        return [Patch(facecolor=LIMIT, label=whole), Patch(facecolor=COLLISION, label="collisions among them")]
    return (
        [Patch(label=name, **face) for name, face in _faces(looks).items()]
        if chart.kind == "bars"
        else [Line2D([], [], label=name, **look.line(), lw=1.4, markersize=5) for name, look in looks.items()]
    )


def _panel(
    chart: Chart, axes: Axes, rows: pl.DataFrame, published: pl.DataFrame, value: str, looks: dict[str, Look]
) -> None:
    if chart.kind == "bars":
        draw_bars(axes, rows, published, value, looks, chart.part)
    else:
        draw_lines(axes, rows, published, value, chart, looks)


def _scale(chart: Chart, axes: Axes, rows: pl.DataFrame, value: str, published: pl.DataFrame) -> None:
    if chart.kind == "lines" and chart.per == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif chart.kind == "lines" and chart.per == "lifetime":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    elif chart.kind == "lines" and chart.x in SHARES:
        axes.xaxis.set_major_formatter(_PERCENT)
    heights = [*rows[value].drop_nulls(), *_published_of(published, value)]
    highest = max(heights, default=0.0)
    close = chart.x in SHARES and min(heights, default=0.0) > highest / 2  # points of two rates would be a heap
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    elif value in SIGNED or close:
        axes.yaxis.set_major_formatter(_PERCENT)
    elif value in SHARES:
        from_zero(axes, highest)
    else:
        axes.set_ylim(0, 1.1 * highest or 1)


def _published_of(published: pl.DataFrame, value: str) -> list[float]:
    return published.filter(pl.col("value") == value)["high"].to_list() if len(published) else []


_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")


# Lines


def draw_lines(
    axes: Axes, rows: pl.DataFrame, published: pl.DataFrame, value: str, chart: Chart, looks: Mapping[str, Look]
) -> None:
    """Draw a line per series. Where x is a value, Belady's is an upright line."""
    x = chart.x
    for name, look in looks.items():
        line = rows.filter(pl.col("series") == name).drop_nulls([x])
        if line.is_empty():
            continue
        if name == BOUND and x != "x":
            axes.axvline(line[x][0], color=look.colour, linestyle="--", lw=1.2)
            continue
        heights = line[value].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        across = line[x].cast(pl.Float64).to_numpy()
        if chart.shade:
            axes.plot(across, heights, color=look.colour, lw=0.7)
            strength = np.linspace(0.25, 1.0, len(across)) if len(across) > 1 else 1.0
            axes.scatter(across, heights, s=22, color=look.colour, marker=look.marker, alpha=strength, zorder=3)
        else:
            axes.plot(across, heights, **look.line(), lw=1.4, markersize=4)
    for mark in published.iter_rows(named=True) if len(published) else ():
        _mark_line(axes, mark, value, x, looks)


def _mark_line(axes: Axes, mark: Mapping[str, Any], value: str, x: str, looks: Mapping[str, Look]) -> None:
    """Draw a published number: a band for the horizontal axis, a hollow mark for the vertical one."""
    look = looks.get(mark["series"])
    if look is None:
        return
    if mark["value"] == x:
        axes.axvspan(mark["low"], mark["high"], color=look.colour, alpha=0.15, lw=1.5)
    elif mark["value"] == value and mark["low"] < mark["high"]:
        _mark_bar(axes, float(mark["x"]), 0.6, mark["low"], mark["high"], look.colour)
    elif mark["value"] == value:
        axes.plot([float(mark["x"])], [mark["low"]], marker=look.marker, color=look.colour, **MARK)


# Bars

WIDTH, SMALL = 0.8, 6.0  #: width of a group of bars, and points of the letters above a bar
LETTERS = 0.06  #: their height as a part of the panel's
NAME_SIZE = SMALL + 1  #: points of the letters below
MOST_LETTERS, MOST_NAMES = 13, 6  #: names that fit side by side below a panel


def _faces(looks: Mapping[str, Look]) -> dict[str, dict[str, Any]]:
    """Return the bar style of each series; a repeated colour is hatched."""
    taken: set[str] = set()
    faces: dict[str, dict[str, Any]] = {}
    for name, look in looks.items():
        hatch = {"hatch": "//", "edgecolor": "white"} if look.colour in taken else {}
        faces[name] = {"facecolor": look.colour, "linewidth": 0} | hatch
        taken.add(look.colour)
    return faces


def draw_bars(
    axes: Axes, rows: pl.DataFrame, published: pl.DataFrame, value: str, looks: Mapping[str, Look], part: str = ""
) -> None:
    """Draw the series of a name side by side; an undefined value leaves a gap. A `part` is red within grey bars."""
    names = rows["x"].unique(maintain_order=True).to_list()
    spots, faces = _spots(rows, names), _faces(looks)
    known = published.filter(pl.col("value") == value).iter_rows(named=True) if len(published) else ()
    marks = {(mark["series"], mark["x"]): (mark["low"], mark["high"]) for mark in known}
    letters = LETTERS * max([*rows[value].drop_nulls(), *_published_of(published, value)], default=0.0)
    for (series, name), (middle, width) in spots.items():
        bar = rows.filter((pl.col("series") == series) & (pl.col("x") == name))
        found = bar[value].drop_nulls()
        ends = marks.get((series, name), ())
        if ends:
            _mark_bar(axes, middle, width, *ends)
        if len(found):
            axes.bar(middle, found[0], 0.9 * width, **({"facecolor": LIMIT} if part else faces[series]))
            if part:
                axes.bar(middle, bar[part][0], 0.9 * width, facecolor=COLLISION)
            # above its bar, or above a mark on the bar's top or less than `letters` above
            over = ends[1] if ends and ends[0] - letters <= found[0] <= ends[1] else found[0]
            axes.annotate(_short(found[0], value), (middle, over), (0, 1), fontsize=SMALL, **_ABOVE)
    fits = _fit(names)
    axes.set_xticks(
        range(len(names)),
        names if fits else [_split(name) for name in names],
        fontsize=NAME_SIZE,
        rotation=0 if fits else 90,
    )
    axes.grid(visible=False, axis="x")


def _spots(rows: pl.DataFrame, names: Sequence[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return middle and width of the bar of each (series, name)."""
    spots = {}
    for at, name in enumerate(names):
        series = rows.filter(pl.col("x") == name)["series"].unique(maintain_order=True).to_list()
        width = WIDTH / len(series)
        for place, each in enumerate(series):
            spots[each, name] = (at - WIDTH / 2 + (place + 0.5) * width, width)
    return spots


def _mark_bar(axes: Axes, middle: float, width: float, low: float, high: float, colour: str = INK) -> None:
    axes.plot([middle, middle], [low, high], color=colour, lw=1.2, zorder=3)
    for end in (low, high):
        axes.plot([middle - 0.35 * width, middle + 0.35 * width], [end, end], color=colour, lw=1.6, zorder=3)


def _fit(names: Sequence[str]) -> bool:
    """Return whether names fit side by side below a panel; others stand upright, in two lines."""
    return len(names) <= MOST_NAMES and max(map(len, names), default=0) <= MOST_LETTERS


def _split(name: str) -> str:
    """Write a policy above its parameters."""
    return name.replace(":", "\n", 1)


def _short(number: float, value: str) -> str:
    if value in SHARES:
        return f"{100 * number:.1f}" if number < 0.1 else f"{100 * number:.0f}"
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


_ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "color": INK}
