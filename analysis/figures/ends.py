"""95 % intervals of what figures draw, from the rows of requests, and a sentence on them or on why there are none."""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes

from moereplay.analysis.comparisons import shares_passes
from moereplay.analysis.figure_numbers import ENDS
from moereplay.analysis.metrics import HIGH, LOW, rows_of
from moereplay.analysis.statistics import FEW
from moereplay.results.remarks import synthetic_of


def bars(axes: Axes, rows: pl.DataFrame, x: str, y: str, colour: str, name: str) -> None:
    """Draw the intervals of a line's points, where there are any, behind its markers."""
    if f"{y}{LOW}" not in rows.columns:
        return
    known = rows.drop_nulls([f"{y}{LOW}", f"{y}{HIGH}"])
    if not known.is_empty():
        places, low, high = (known[name].to_numpy() for name in (x, f"{y}{LOW}", f"{y}{HIGH}"))
        axes.vlines(places, low, high, colors=colour, linewidth=1.1, alpha=0.75, zorder=1.9, label=f"{ENDS}{name}")


def highest(rows: pl.DataFrame, y: str) -> float:
    """Return the largest value that is drawn, intervals included; 0 without any."""
    values = [rows[name].drop_nulls().to_list() for name in (y, f"{y}{HIGH}") if name in rows.columns]
    return max((value for each in values for value in each), default=0.0)


def said(frame: pl.DataFrame) -> str:
    """Return what the vertical bars are, or why there are none."""
    every = [rows_of(frame, at) for at in range(len(frame))]
    if all(synthetic_of(about) for about in frame["about"]):
        return "No intervals: the routing is synthetic."
    if not any(every):
        return "No intervals: rows of requests were not stored."
    kept = [rows for rows in every if rows]
    if all(shares_passes(rows) for rows in kept):
        return "No intervals: requests share passes."
    fewest = min(map(len, kept))
    if max(map(len, kept)) < 2:
        return "No intervals: one request."
    few = ", rough: fewer than ten" if fewest < FEW else ""
    return f"Bars: 95 % intervals over requests (n = {fewest}{few})."
