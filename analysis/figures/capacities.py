"""What figures against capacity share: the percentages of their rows, and the axis of capacities."""

from __future__ import annotations

import math

import polars as pl
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from moereplay.analysis.figures.facets import Facets, facets
from moereplay.analysis.figures.lines import apart, axis_name, spans_a_decade
from moereplay.analysis.metrics import measured
from moereplay.results.errors import ResultError

PERCENT = pl.col("capacity_forms").str.extract(r"^([\d.e+-]+)%").cast(pl.Float64).alias("percent")


def with_percents(frame: pl.DataFrame) -> Facets:
    """Panels of the configurations, each with its metrics and with `percent`: its capacity of all expert bytes."""
    return facets(frame, measured(frame).with_columns(PERCENT))


def percents(rows: pl.DataFrame) -> list[float]:
    """The capacities, rising."""
    return rows["percent"].unique().sort().to_list()


def check_several(found: Facets, figure: str) -> None:
    """Raises ResultError if there is one capacity only."""
    if len(percents(found.rows)) < 2:
        raise ResultError(
            f"{figure} needs two capacities or more, found {', '.join(found.capacities)}; "
            "replay several, for example --capacity 1%,5%,25%"
        )


def axis(rows: pl.DataFrame) -> str:
    """The label of the axis."""
    return axis_name("capacity", spans_a_decade(percents(rows)))


def scale(axes: Axes, rows: pl.DataFrame) -> None:
    """Logarithmic if capacities span more than a decade; ticks where replays are."""
    values = percents(rows)
    logarithmic = spans_a_decade(values)
    axes.set_xscale("log" if logarithmic else "linear")
    named(axes, apart(values, math.log if logarithmic else float))


def named(axes: Axes, ticks: list[float]) -> None:
    """Ticks at these percentages and nowhere else."""
    axes.set_xticks(ticks)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
