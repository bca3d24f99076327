"""Quality against what it buys: a panel per task, a point per policy set, the best trade-offs on a front."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import polars as pl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moereplay.analysis.figures.facets import MOST_COLUMNS
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.palette import INK, MUTED, Look, in_order
from moereplay.analysis.quality import Judged, figures, judged, leading
from moereplay.results.result import ResultError, Row

FRONT = {"color": INK, "lw": 0.9, "linestyle": ":", "zorder": 1}
NOTE = (
    "Loss: how much worse than the unmodified model, in the units of the measure, on the same examples; bars are 95 % "
    "intervals over examples. Dotted: sets that no other beats in both."
)


class Axis(NamedTuple):
    """What quality is drawn against."""

    title: str
    label: str
    of: Callable[[Row], float | None]  #: a row's figures, as `analysis.quality.figures` has them
    more_is_better: bool


class Point(NamedTuple):
    """A policy set in a panel."""

    family: str  #: the name of the set, without what its lists vary
    x: float
    loss: float
    off: float


def draw_against(frame: pl.DataFrame, axis: Axis) -> Figure:
    """A panel per task with its leading measure. Raises ResultError where nothing has that measure and that axis."""
    tasks = frame["task"].unique(maintain_order=True).to_list()
    panels = {task: points(frame, task, axis) for task in tasks}
    panels = {task: found for task, found in panels.items() if found}
    if not panels:
        raise ResultError(f"no task has examples and {axis.label}; ask one whose measure is a mean over examples")
    if len(panels) > MOST_COLUMNS:
        raise ResultError(f"{len(panels)} tasks do not fit a page of {MOST_COLUMNS} columns; ask fewer")
    drawn = in_order(sorted({point.family for found in panels.values() for point in found}))
    titles = [f"{task}, {leading(frame, task)}" for task in panels]
    about = frame["about"][0]
    wording = Wording(axis.title, f"{about['model']}, {about['dtype']}", "LIVE, emulated", axis.label, "loss", NOTE)
    grid = Grid(titles, [""], (6.0 if len(panels) == 1 else 3.2, 3.0), scales="columns")
    sheet = Sheet(
        grid, wording, [*map(_entry, drawn, drawn.values()), Line2D([], [], **FRONT, label="best trade-offs")]
    )
    for axes, found in zip(sheet.panels[0], panels.values(), strict=True):
        _fill(axes, found, drawn, axis)
    return sheet.figure


def points(frame: pl.DataFrame, task: str, axis: Axis) -> list[Point]:
    """The policy sets of a task that have both figures, by name."""
    rows = {row["set"]: row for row in frame.filter(pl.col("task") == task).iter_rows(named=True)}
    first = leading(frame, task)
    found = [_point(each, axis.of(figures(rows[each.set]))) for each in judged(frame) if _is(each, task, first)]
    return [point for point in found if point is not None]


def front(found: list[Point], more_is_better: bool) -> list[Point]:
    """Those that no other beats in one figure without losing in the other, from the left."""
    sign = -1 if more_is_better else 1
    best, kept = float("inf"), []
    for point in sorted(found, key=lambda each: (sign * each.x, each.loss)):
        if point.loss < best:
            best, kept = point.loss, [*kept, point]
    return sorted(kept, key=lambda each: each.x)


def _is(each: Judged, task: str, measure: str) -> bool:
    return (each.task, each.measure) == (task, measure)


def _point(each: Judged, x: float | None) -> Point | None:
    if x is None or each.loss is None:
        return None
    return Point(each.set.partition(" ")[0], x, each.loss, each.off or 0.0)


def _entry(name: str, look: Look) -> Artist:
    return Line2D([], [], **(look.line() | {"markersize": 5, "lw": 0.8}), label=name)


def _fill(axes: Axes, found: list[Point], drawn: dict[str, Look], axis: Axis) -> None:
    axes.axhline(0, color=MUTED, lw=0.8)
    best = front(found, axis.more_is_better)
    axes.plot([each.x for each in best], [each.loss for each in best], **FRONT)
    for name, look in drawn.items():
        own = sorted((each for each in found if each.family == name), key=lambda each: each.x)
        across, up, off = ([getattr(each, what) for each in own] for what in ("x", "loss", "off"))
        shape = look.line() | {"markersize": 5, "lw": 0.8, "elinewidth": 0.8, "capsize": 2}
        axes.errorbar(across, up, yerr=off, **shape)
