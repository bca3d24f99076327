"""What figures against capacity share: the percentages of their rows, and the axis of capacities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

import polars as pl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from moereplay.analysis.figures.facets import Facets, facets
from moereplay.analysis.figures.lines import apart, axis_name, spans_a_decade
from moereplay.analysis.figures.sheet import DPI
from moereplay.analysis.metrics import measured, with_ends
from moereplay.results.result import ResultError
from moereplay.traces.texts import digits

ALIKE = 1.01  #: how far two sizes of all experts may be apart, as percentages have four digits
MARGINS = 0.05  #: of an axis, at each end, as a part of what lies between them

PERCENT = pl.col("capacity_forms").str.extract(r"^([\d.e+-]+)%").cast(pl.Float64).alias("percent")


def with_percents(frame: pl.DataFrame, *figures: str) -> Facets:
    """Panels of the configurations, each with its metrics, the intervals of `figures`, and `percent`: its capacity of
    all expert bytes."""
    return facets(frame, with_ends(frame, measured(frame), figures).with_columns(PERCENT))


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


def meaning(rows: pl.DataFrame) -> str:
    """A sentence on what the ticks are."""
    return "Capacity: of all expert bytes." if unit_of(rows) in ("%", "") else "Capacity: of experts, as it was given."


def unit_of(rows: pl.DataFrame) -> str:
    """The unit in which every capacity was typed; empty where there are several, or models of several sizes."""
    units = {text.lstrip("0123456789.") for text in rows["capacity"]}
    places = rows.select("percent", "capacity").drop_nulls()
    wholes = [_number(text) / percent for percent, text in places.iter_rows() if percent]
    alike = len(units) == 1 and wholes and max(wholes) <= ALIKE * min(wholes)
    return units.pop() if alike else ""


def _number(capacity: str) -> float:
    return float("".join(takewhile(lambda letter: letter in "0123456789.", capacity)) or 0)


def worded(rows: pl.DataFrame) -> Callable[[float], str]:
    """How a place on the axis is written: as the user typed it where every capacity has the same unit."""
    unit = unit_of(rows)
    typed = dict(zip(rows["percent"], rows["capacity"], strict=True)) if unit not in ("%", "") else {}
    one = next(((percent, float(text.removesuffix(unit))) for percent, text in typed.items() if percent), None)

    def word(percent: float) -> str:
        if percent in typed:
            return typed[percent]
        return f"{percent:g}%" if one is None else f"{digits(percent * one[1] / one[0], 2)}{unit}"

    return word


def scale(axes: Axes, rows: pl.DataFrame) -> None:
    """Logarithmic if capacities span more than a decade; ticks where replays are."""
    values = percents(rows)
    logarithmic = spans_a_decade(values)
    axes.set_xscale("log" if logarithmic else "linear")
    inches, word = inches_of(axes), worded(rows)
    named(axes, apart(values, math.log if logarithmic else float, word, inches), word, values)


def inches_of(axes: Axes) -> float:
    """The length of the horizontal axis, without its margins."""
    return float(axes.bbox.width) / DPI / (1 + 2 * MARGINS)


def named(axes: Axes, ticks: Sequence[float], word: Callable[[float], str], others: Sequence[float] = ()) -> None:
    """Labelled ticks at these percentages, and small ones without a label at the others."""
    axes.set_xticks(ticks)
    axes.minorticks_off()
    axes.set_xticks([each for each in others if each not in ticks], minor=True)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: word(value)))
