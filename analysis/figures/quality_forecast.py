"""Live against forecast: each point as the others forecast it, with its interval, beside the diagonal."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.forecast import Forecast, forecast
from moereplay.analysis.forecast_fit import LEVEL, Left, moved
from moereplay.analysis.palette import INK, MUTED, Look, looks
from moereplay.results.result import ResultError

#: nll: the rise of the negative log-likelihood, whose exponential is that of perplexity.
OPTIONS: dict[str, tuple[str, ...]] = {"measure": ("kl", "nll")}
DIAGONAL = {"color": INK, "lw": 0.9, "linestyle": ":", "zorder": 1}
NOTE = (
    f"Across: forecast without any point of the policy, or without the point alone where the others do not reach it "
    f"(hollow). Bars: intervals of {LEVEL:.0%}. Both scales are logarithmic beyond the noise of the live points, and "
    "linear below it. What even that does not reach is not drawn."
)


def draw(frame: pl.DataFrame, measure: str) -> Figure:
    """The first task of a frame of `results.quality` that allows a forecast. Raises ResultError where none does."""
    made = _first(frame, measure)
    drawn = looks({each.policy for each in made.points})
    subtitle = f"{made.model}, {made.dtype}; {made.task}, {made.measure}, nats per token"
    wording = Wording("What live runs say of a forecast", subtitle, "FORECAST", "forecast loss", "live loss", NOTE)
    legend = [Line2D([], [], **_shape(look), label=name) for name, look in drawn.items()]
    sheet = Sheet(Grid([""], [""], (5.0, 4.2)), wording, [*legend, Line2D([], [], **DIAGONAL, label="as forecast")])
    _fill(sheet.panels[0][0], made, drawn)
    return sheet.figure


def _first(frame: pl.DataFrame, measure: str) -> Forecast:
    refusals = list[ResultError]()
    for task in frame["task"].unique(maintain_order=True):
        try:
            return forecast(frame, task, measure)
        except ResultError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _fill(axes: Axes, made: Forecast, drawn: dict[str, Look]) -> None:
    known = [each for each in made.left if each.best is not None]
    ends = [value for each in known for value in (each.point.loss, each.best or 0.0)]
    low, high = min(0.0, *ends), max(ends)
    axes.plot([low, high], [low, high], **DIAGONAL)
    axes.axhline(0, color=MUTED, lw=0.6)
    for each in known:
        _mark(axes, each, made, drawn[each.point.policy])
    for scale in (axes.set_xscale, axes.set_yscale):
        scale("symlog", linthresh=made.fit.noise)


def _mark(axes: Axes, left: Left, made: Forecast, look: Look) -> None:
    said = left.best or 0.0
    ends = [abs(moved(said, by, made.fit.noise) - said) for by in (-made.reach, made.reach)]
    filled: dict[str, Any] = {} if left.by_others is not None else {"markerfacecolor": "white"}
    bars = [[ends[0]], [ends[1]]]
    axes.errorbar([said], [left.point.loss], xerr=bars, elinewidth=0.6, **_shape(look), **filled)


def _shape(look: Look) -> dict[str, Any]:
    return look.line() | {"linestyle": "none", "markersize": 5}
