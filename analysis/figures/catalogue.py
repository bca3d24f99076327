"""Figures from results. Adding one is a function that returns a chart (`chart.py`), and its row in a table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import polars as pl

from moereplay.analysis import forecast
from moereplay.analysis.checks import COLUMN
from moereplay.analysis.figures.by_capacity import arrives, curves_alone, unmatched
from moereplay.analysis.figures.chart import Chart, on_page
from moereplay.analysis.figures.drawing import KINDS, Picture, rendered, save, save_caption, save_numbers
from moereplay.analysis.figures.facets import More
from moereplay.results.errors import ResultError, unknown
from moereplay.results.serving import Level

__all__ = [
    "CHECK_FIGURES",
    "FIGURES",
    "FORECAST_FIGURES",
    "KINDS",
    "MEASURED_FIGURES",
    "QUALITY_FIGURES",
    "SERVING_FIGURES",
    "VALIDATION_FIGURES",
    "Drawn",
    "chart",
    "draw",
    "draw_all",
    "draw_curves",
    "on_page",
    "save",
    "save_caption",
    "save_numbers",
    "unmatched",
]


class Source(NamedTuple):
    """Module of a figure, which has a function of its name, and the values of its options."""

    module: str
    options: Mapping[str, Sequence[str]] = {}  #: name -> values, the first is the default
    curves: bool = False  #: whether it takes curves too
    level: bool = False  #: whether it takes a service level too
    more: bool = False  #: whether it takes `More` too


#: Figures of each kind of results, in the order of reports: replays, then those that were checked or have forecasts,
#: validations, measured runs, and quality.
FIGURES = {
    "collisions_by_layer": Source(
        "misses", {"phase": ("decode", "prefill", "both"), "per": ("miss", "access")}, more=True
    ),
    "collisions_in_prefill": Source("misses", {"per": ("miss", "access")}, more=True),
    "misses": Source("misses"),
    "hit_rate_by_capacity": Source("by_capacity", curves=True),
    "complete_by_capacity": Source("by_capacity"),
    "ttft_by_capacity": Source("by_capacity", {"latency": ("ttft_mean_ms", "ttft_median_ms")}),
    "tpot_by_capacity": Source("by_capacity"),
}
#: Of replays whose requests arrive over time.
SERVING_FIGURES = {
    "latency_by_rate": Source("by_capacity", {"percentile": ("99", "90", "50")}, level=True),
}
CHECK_FIGURES = {"checks": Source("real_runs")}
FORECAST_FIGURES = {"forecast_by_speed": Source("quality")}
VALIDATION_FIGURES = {"validation": Source("real_runs"), "open_loop_error": Source("real_runs")}
MEASURED_FIGURES = {"measured": Source("real_runs")}
QUALITY_FIGURES = {
    "quality_by_miss_rate": Source("quality"),
    "quality_by_speed": Source("quality"),
    "quality_by_parameter": Source("quality"),
    "quality_forecast": Source("quality", {"measure": ("kl", "nll")}),
}


class Drawn(NamedTuple):
    """Figures by name, with the reasons and remedies for those that the rows do not support."""

    figures: list[tuple[str, Picture]]
    left_out: dict[str, str]


def chart(
    name: str,
    frame: pl.DataFrame,
    curves: pl.DataFrame | None = None,
    level: Level | None = None,
    more: More | None = None,
    **options: str,
) -> Chart:
    """Build the named figure from a frame of results of any kind.

    `curves`, the rows of `results.curves.load`, a service level and `more` are for figures that take them.

    Raises ResultError for an unknown name, option or value, or naming the missing replays if the rows do not suffice.
    """
    known = _fed_by(frame)
    if name not in known:
        raise unknown("figure", name, known)
    if frame.is_empty():
        raise ResultError(f"{name} has no results to draw; load a folder of results first")
    source = known[name]
    make = getattr(import_module(f"moereplay.analysis.figures.{source.module}"), name)
    given = {"curves": curves} if source.curves else {}
    given |= ({"level": level} if source.level else {}) | ({"more": more} if source.more and more else {})
    return make(frame, **given, **_chosen(name, source.options, options))


def draw(
    name: str,
    frame: pl.DataFrame,
    curves: pl.DataFrame | None = None,
    level: Level | None = None,
    more: More | None = None,
    **options: str,
) -> Picture:
    """Return the picture of that chart. Raises ResultError as `chart` does."""
    return rendered(chart(name, frame, curves, level, more, **options))


def draw_curves(curves: pl.DataFrame) -> Picture:
    """Return the picture of curves alone, for a folder without replays. Raises ResultError if there are none."""
    return rendered(curves_alone(curves))


def draw_all(
    frame: pl.DataFrame,
    names: Sequence[str] | None = None,
    curves: pl.DataFrame | None = None,
    level: Level | None = None,
    more: More | None = None,
) -> Drawn:
    """Draw the named figures, or without names all that these rows allow.

    Raises ResultError if a named one cannot be drawn, or without names if none can.
    """
    if names is not None:
        return Drawn([(name, draw(name, frame, curves, level, more)) for name in names], {})
    drawn, refusals = Drawn([], {}), list[ResultError]()
    for name in _fed_by(frame):
        try:
            drawn.figures.append((name, draw(name, frame, curves, level, more)))
        except ResultError as refusal:
            refusals.append(refusal)
            drawn.left_out[name] = str(refusal).removeprefix(f"{name} ")
    if not drawn.figures:
        raise refusals[0]
    return drawn


def _fed_by(frame: pl.DataFrame) -> Mapping[str, Source]:
    """Return the figures of the kind of results that these rows are."""
    if "closure_tpot_ms" in frame.columns:
        return MEASURED_FIGURES
    if "open_loop" in frame.columns:
        return VALIDATION_FIGURES
    if "measures" in frame.columns:
        return QUALITY_FIGURES
    stored = COLUMN in frame.columns or "latency" in frame.columns  # only stored results can have been checked
    more = FORECAST_FIGURES if forecast.COLUMN in frame.columns else {}
    replays = FIGURES | SERVING_FIGURES if arrives(frame) else FIGURES
    return replays | CHECK_FIGURES | more if stored else replays


def _chosen(name: str, known: Mapping[str, Sequence[str]], options: Mapping[str, str]) -> dict[str, str]:
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of {name}", option, known)
        if value not in known[option]:
            raise unknown(f"value of {name}'s {option}", value, known[option])
    return {option: values[0] for option, values in known.items()} | dict(options)
