"""One file per figure. Adding one is a file here, with `OPTIONS` and `draw`, and its name in one of the lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import polars as pl
from matplotlib.figure import Figure

from analysis.checks import COLUMN
from analysis.figures.sheet import save, styled
from results.errors import ResultError, unknown

__all__ = [
    "CHECK_FIGURES",
    "FIGURES",
    "MEASURED_FIGURES",
    "VALIDATION_FIGURES",
    "draw",
    "draw_all",
    "draw_curves",
    "save",
]

#: Of replays, of those that were checked as well, of live runs beside replays, and of measured ones, in the order in
#: which reports show them.
FIGURES = ("collisions_by_layer", "misses", "hit_rate_by_capacity", "ttft_by_capacity")
CHECK_FIGURES = ("checks",)
VALIDATION_FIGURES = ("validation", "open_loop_error")
MEASURED_FIGURES = ("measured",)


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
    figure = import_module(f"analysis.figures.{name}")
    more = {"curves": curves} if getattr(figure, "TAKES_CURVES", False) else {}
    with styled():
        return figure.draw(frame, **more, **_chosen(name, figure.OPTIONS, options))


def draw_curves(curves: pl.DataFrame) -> Figure:
    """The page of curves alone, for a folder without replays. Raises ResultError if there are none."""
    with styled():
        return import_module("analysis.figures.curves").draw(curves)


def draw_all(
    frame: pl.DataFrame, names: Sequence[str] | None = None, curves: pl.DataFrame | None = None
) -> list[tuple[str, Figure]]:
    """The named figures with their names; without names, all that these rows allow.

    Raises ResultError if a named one cannot be drawn, or without names if none can.
    """
    if names is not None:
        return [(name, draw(name, frame, curves)) for name in names]
    drawn: list[tuple[str, Figure]] = []
    refusals: list[ResultError] = []
    for name in _fed_by(frame):
        try:
            drawn.append((name, draw(name, frame, curves)))
        except ResultError as refusal:
            refusals.append(refusal)
    if not drawn:
        raise refusals[0]
    return drawn


def _fed_by(frame: pl.DataFrame) -> tuple[str, ...]:
    """The list that these rows are for."""
    if "closure_tpot_ms" in frame.columns:
        return MEASURED_FIGURES
    if "open_loop" in frame.columns:
        return VALIDATION_FIGURES
    return (*FIGURES, *CHECK_FIGURES) if COLUMN in frame.columns else FIGURES


def _chosen(name: str, known: Mapping[str, tuple[str, ...]], options: Mapping[str, str]) -> dict[str, str]:
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of {name}", option, known)
        if value not in known[option]:
            raise unknown(f"value of {name}'s {option}", value, known[option])
    return {option: values[0] for option, values in known.items()} | dict(options)
