"""Real runs beside their replays: every run's time per token, and every pass."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.results.result import ResultError

OPTIONS: dict[str, tuple[str, ...]] = {}
LINKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  #: a colour per throttle
PANELS = ("Every run", "Every pass")


def check_throttles(links: Sequence[float | None]) -> None:
    """Raises ResultError for more throttles than there are colours."""
    if len(links) > len(LINKS):
        raise ResultError(
            f"{len(links)} throttles do not fit one figure, which has {len(LINKS)} colours; measure fewer"
        )


def draw(frame: pl.DataFrame) -> Figure:
    """Simulated over measured milliseconds, on the diagonal where they are equal: runs, and passes of all runs.

    Raises ResultError for more throttles than there are colours.
    """
    links = sorted(frame["throttle_bytes_per_s"].unique().to_list(), key=lambda rate: rate or float("inf"))
    check_throttles(links)
    note = (
        "Simulated: a replay on the platform calibrated around the runs, on other tokens. Left a point for every run, "
        "right one for every pass of every run. On the line the replay is right."
    )
    errors = [f"{_mean_error(_of(frame, rate)):.1%} {_name(rate)}" for rate in links]
    title = f"{len(frame)} real runs: the replay's time per token is off by {', '.join(errors)}"
    wording = Wording(
        title, str(frame["device"][0]), "MEASURED beside SIMULATED", "measured, ms (log)", "simulated, ms (log)", note
    )
    sheet = Sheet(Grid(PANELS, [""], (3.2, 3.2)), wording, [_entry(at, rate) for at, rate in enumerate(links)])
    for at, rate in enumerate(links):
        rows = _of(frame, rate)
        _points(sheet.panels[0][0], rows["measured_tpot_ms"].to_list(), rows["simulated_tpot_ms"].to_list(), at, 5)
        each = rows.select("measured_tokens_ms", "simulated_tokens_ms").explode(
            "measured_tokens_ms", "simulated_tokens_ms"
        )
        _points(sheet.panels[0][1], each["measured_tokens_ms"].to_list(), each["simulated_tokens_ms"].to_list(), at, 2)
    times = [ms for side in ("measured", "simulated") for ms in frame[f"{side}_tokens_ms"].explode().to_list()]
    for axes in sheet.panels[0]:
        _diagonal(axes, min(times), max(times))
    return sheet.figure


def _of(frame: pl.DataFrame, rate: float | None) -> pl.DataFrame:
    """The runs under one throttle."""
    return frame.filter(pl.col("throttle_bytes_per_s").eq_missing(rate))


def _name(rate: float | None) -> str:
    return "raw" if rate is None else f"at {rate / 1e6:g} MB/s"


def _mean_error(frame: pl.DataFrame) -> float:
    error = (pl.col("simulated_tpot_ms") / pl.col("measured_tpot_ms") - 1).abs().mean()
    return float(frame.select(error).item())


def _entry(at: int, rate: float | None) -> Line2D:
    return Line2D([], [], color=LINKS[at], marker="o", linestyle="", label=_name(rate))


def _points(axes: Axes, x: Sequence[float], y: Sequence[float], at: int, size: float) -> None:
    axes.plot(x, y, color=LINKS[at], marker="o", linestyle="", markersize=size, alpha=0.6, markeredgewidth=0)


def _diagonal(axes: Axes, least: float, most: float) -> None:
    """Both axes from the shortest to the longest pass: prompts take many times what a token takes."""
    ends = (least / 1.2, most * 1.2)
    axes.plot(ends, ends, color="#888888", linewidth=0.8, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.0f}"))
