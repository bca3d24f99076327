"""Latency against capacity: what more memory buys a user who waits for the first token, or for the next."""

from __future__ import annotations

import math

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from analysis.checks import caption, ringed
from analysis.figures.facets import facets
from analysis.figures.lines import apart, legend, panel_size, plot, ring_handles, rings
from analysis.figures.sheet import Grid, Sheet, Wording
from analysis.metrics import measured
from analysis.palette import looks
from analysis.ratios import FORMULAS
from results.errors import ResultError
from results.read import seconds_of

OPTIONS = {"latency": ("ttft_mean_ms", "ttft_median_ms", "tpot_ms")}
WORDS = {"ttft_mean_ms": "mean TTFT", "ttft_median_ms": "median TTFT", "tpot_ms": "TPOT"}
LOG_FROM = 10  #: ratio of the largest to the smallest capacity from which the axis is logarithmic


def draw(frame: pl.DataFrame, latency: str) -> Figure:
    """A line per eviction policy, a panel per setting.

    Raises ResultError if the rows have one capacity only, or nothing was timed.
    """
    percent = pl.col("capacity_forms").str.extract(r"^([\d.e+-]+)%").cast(pl.Float64)
    found = facets(frame, measured(frame).with_columns(percent.alias("percent")))
    _check(found.rows, latency)
    drawn = looks(found.policies)
    word = WORDS[latency]
    seconds = f"Seconds: {seconds_of(frame)}."
    checked = _checked(frame, latency)
    marked, off = ringed(frame, checked), caption(frame, checked)
    note = f"{word}: {FORMULAS[latency]}. {seconds} Capacity: of all expert bytes. {off}".rstrip()
    title = f"{word[0].upper()}{word[1:]} against capacity"
    wording = Wording(title, found.shared, found.label, "capacity", f"{word}, ms", note)
    handles = [*legend(drawn), *ring_handles(marked)]
    sheet = Sheet(Grid([""], found.settings, panel_size(len(found.settings), 1)), wording, handles)
    for row, setting in enumerate(found.settings):
        plot(sheet.panels[row][0], found.panel(setting), "percent", latency, drawn)
        rings(sheet.panels[row][0], found.panel(setting), "percent", latency, marked)
    _scale(sheet.panels[0][0], found.rows, latency)
    return sheet.figure


def _checked(frame: pl.DataFrame, latency: str) -> str:
    """The time whose error is said: this one's where it was checked, or the other's."""
    own = "tpot_ms" if latency == "tpot_ms" else "ttft_ms"
    return own if ringed(frame, own) or own == "tpot_ms" else "tpot_ms"


def _check(rows: pl.DataFrame, latency: str) -> None:
    if rows["percent"].n_unique() < 2:
        raise ResultError("ttft_by_capacity needs two capacities or more; replay several, as --capacity 1%,5%,25%")
    if rows[latency].drop_nulls().is_empty():
        raise ResultError(f"{WORDS[latency]} is undefined in every row; replay requests that have a prompt")


def _scale(axes: Axes, rows: pl.DataFrame, latency: str) -> None:
    """Logarithmic if capacities span more than a decade; times from zero, so that lengths compare."""
    percents = rows["percent"].unique().sort().to_list()
    logarithmic = percents[-1] > LOG_FROM * percents[0]
    axes.set_xscale("log" if logarithmic else "linear")
    axes.set_xticks(apart(percents, math.log if logarithmic else float))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
    axes.set_ylim(0, 1.06 * max(rows[latency].drop_nulls().to_list()) or 1)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
