"""Lines over numbers, or from cell to cell where the axis is a value; published numbers as hollow marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl
from matplotlib.axes import Axes

from moereplay.analysis.palette import Look
from moereplay.results.chart import BOUND

MARK: dict[str, Any] = {"markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.4, "linestyle": "none"}


def draw(
    axes: Axes, rows: pl.DataFrame, published: pl.DataFrame, value: str, x: str, looks: Mapping[str, Look]
) -> None:
    """A line per series in the order of its rows; one of points over a value has Belady's as an upright line."""
    for name, look in looks.items():
        line = rows.filter(pl.col("series") == name).drop_nulls([x])
        if line.is_empty():
            continue
        if name == BOUND and x != "x":
            axes.axvline(line[x][0], color=look.colour, linestyle="--", lw=1.2)
            continue
        heights = line[value].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        axes.plot(line[x].cast(pl.Float64).to_numpy(), heights, **look.line(), lw=1.4, markersize=4)
    for mark in published.iter_rows(named=True) if len(published) else ():
        _mark(axes, mark, value, x, looks)


def _mark(axes: Axes, mark: Mapping[str, Any], value: str, x: str, looks: Mapping[str, Look]) -> None:
    """A number of the horizontal axis is a band, one of the vertical axis a hollow mark."""
    look = looks.get(mark["series"])
    if look is None:
        return
    if mark["value"] == x:
        axes.axvspan(mark["low"], mark["high"], color=look.colour, alpha=0.15, lw=1.5)
    elif mark["value"] == value:
        axes.plot([float(mark["x"])], [mark["low"]], marker=look.marker, color=look.colour, **MARK)
