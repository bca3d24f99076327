"""One file per figure. Adding one is a file here, with `OPTIONS` and `draw`, and its name in one of the lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import polars as pl
from matplotlib.figure import Figure

from moereplay.analysis import forecast
from moereplay.analysis.checks import COLUMN
from moereplay.analysis.figures.sheet import KINDS, on_page, save, save_caption, save_numbers, styled
from moereplay.results.result import ResultError, unknown

__all__ = [
    "CHECK_FIGURES",
    "FIGURES",
    "FORECAST_FIGURES",
    "KINDS",
    "MEASURED_FIGURES",
    "QUALITY_FIGURES",
    "VALIDATION_FIGURES",
    "Drawn",
    "draw",
    "draw_all",
    "draw_curves",
    "on_page",
    "save",
    "save_caption",
    "save_numbers",
    "unmatched",
]

#: Of replays, of those that were checked as well or have a forecast, of live runs beside replays, of measured ones, and
#: of what a model answered under policies, in the order in which reports show them.
FIGURES = (
    "collisions_by_layer",
    "collisions_in_prefill",
    "misses",
    "hit_rate_by_capacity",
    "ttft_by_capacity",
    "tpot_by_capacity",
)
CHECK_FIGURES = ("checks",)
FORECAST_FIGURES = ("forecast_by_speed",)
VALIDATION_FIGURES = ("validation", "open_loop_error")
MEASURED_FIGURES = ("measured",)
QUALITY_FIGURES = ("quality_by_miss_rate", "quality_by_speed", "quality_by_parameter", "quality_forecast")


class Drawn(NamedTuple):
    """Figures with their names, and the names of those that the rows do not allow, with the reason and the remedy."""

    figures: list[tuple[str, Figure]]
    left_out: dict[str, str]


def draw(name: str, frame: pl.DataFrame, curves: pl.DataFrame | None = None, **options: str) -> Figure:
    """The figure of that name from the rows of `results.load` or `results.validation.load`.

    Options are as in the figure's `OPTIONS`, first = default; `curves`, the rows of `curves.load`, are for figures that
    `TAKES_CURVES`.

    Raises ResultError for an unknown name, option or value, or saying what to replay if the rows do not suffice.
    """
    known = _fed_by(frame)
    if name not in known:
        raise unknown("figure", name, known)
    if frame.is_empty():
        raise ResultError(f"{name} has no results to draw; load a folder of them first")
    figure = import_module(f"moereplay.analysis.figures.{name}")
    more = {"curves": curves} if getattr(figure, "TAKES_CURVES", False) else {}
    with styled():
        return figure.draw(frame, **more, **_chosen(name, figure.OPTIONS, options))


def draw_curves(curves: pl.DataFrame) -> Figure:
    """The page of curves alone, for a folder without replays. Raises ResultError if there are none."""
    with styled():
        return import_module("moereplay.analysis.figures.curves").draw(curves)


def unmatched(frame: pl.DataFrame, curves: pl.DataFrame) -> str:
    """Which curves stand behind no replay of a frame, in words; empty if each of them does."""
    return import_module("moereplay.analysis.figures.hit_rate_by_capacity").unmatched(frame, curves)


def draw_all(frame: pl.DataFrame, names: Sequence[str] | None = None, curves: pl.DataFrame | None = None) -> Drawn:
    """The named figures; without names, all that these rows allow.

    Raises ResultError if a named one cannot be drawn, or without names if none can.
    """
    if names is not None:
        return Drawn([(name, draw(name, frame, curves)) for name in names], {})
    drawn, refusals = Drawn([], {}), list[ResultError]()
    for name in _fed_by(frame):
        try:
            drawn.figures.append((name, draw(name, frame, curves)))
        except ResultError as refusal:
            refusals.append(refusal)
            drawn.left_out[name] = str(refusal).removeprefix(f"{name} ")
    if not drawn.figures:
        raise refusals[0]
    return drawn


def _fed_by(frame: pl.DataFrame) -> tuple[str, ...]:
    """The list that these rows are for."""
    if "closure_tpot_ms" in frame.columns:
        return MEASURED_FIGURES
    if "open_loop" in frame.columns:
        return VALIDATION_FIGURES
    if "measures" in frame.columns:
        return QUALITY_FIGURES
    stored = COLUMN in frame.columns or "latency" in frame.columns  # only stored results can have been checked
    more = FORECAST_FIGURES if forecast.COLUMN in frame.columns else ()
    return (*FIGURES, *CHECK_FIGURES, *more) if stored else FIGURES


def _chosen(name: str, known: Mapping[str, tuple[str, ...]], options: Mapping[str, str]) -> dict[str, str]:
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of {name}", option, known)
        if value not in known[option]:
            raise unknown(f"value of {name}'s {option}", value, known[option])
    return {option: values[0] for option, values in known.items()} | dict(options)
