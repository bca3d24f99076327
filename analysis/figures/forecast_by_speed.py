"""FORECAST quality loss against tokens per second, which are simulated: the trade-offs that a sweep offers."""

from __future__ import annotations

from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moereplay.analysis.figures.quality_panels import FRONT, Point, front
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.analysis.forecast import COLUMN, SIDES, refusals
from moereplay.analysis.forecast_fit import policy_of, tiers_of
from moereplay.analysis.metrics import measured, shared
from moereplay.analysis.palette import MUTED, Look, looks
from moereplay.results.result import ResultError

OPTIONS: dict[str, tuple[str, ...]] = {}
UNCHANGED = "output unchanged"
NOTE = (
    "Loss: rise of perplexity, FORECAST from live points of this model by the counters of these replays; bars hold a "
    "live run nine times in ten. Dotted: configurations that no other beats in both."
)


class _Seen(NamedTuple):
    policy: str
    speed: float
    loss: float  #: percent of perplexity, as are the others
    low: float
    high: float


def draw(frame: pl.DataFrame) -> Figure:
    """A point for each configuration that has a forecast. Raises ResultError where none has one and a speed."""
    found = _seen(frame)
    if not found:
        why = "; ".join(refusals(frame)) or "nothing was decoded"
        raise ResultError(f"forecast_by_speed has no configuration with a FORECAST and tokens/s: {why}")
    drawn = looks({each.policy for each in found})
    wording = Wording(
        "What more speed would cost",
        shared(frame),
        "FORECAST, SIMULATED",
        "tokens/s, SIMULATED",
        "perplexity, % more",
        " ".join([NOTE, *refusals(frame)]),
    )
    legend = [Line2D([], [], **_shape(look), label=name) for name, look in drawn.items()]
    sheet = Sheet(Grid([""], [""], (6.0, 3.4)), wording, [*legend, Line2D([], [], **FRONT, label="best trade-offs")])
    _fill(sheet.panels[0][0], found, drawn)
    return sheet.figure


def _seen(frame: pl.DataFrame) -> list[_Seen]:
    speeds = measured(frame)["tokens_per_s"]
    rows = zip(frame["config"], frame[COLUMN], speeds, strict=True)
    known = [row for row in rows if row[1]["loss"] is not None and row[2] is not None]
    return [_Seen(_called(config), speed, *(100 * said[side] for side in SIDES)) for config, said, speed in known]


def _called(config: dict[str, Any]) -> str:
    policy = policy_of(config)
    return UNCHANGED if policy == "fetch" and not any(tiers_of(config["miss"])) else policy


def _fill(axes: Axes, found: list[_Seen], drawn: dict[str, Look]) -> None:
    axes.axhline(0, color=MUTED, lw=0.8)
    best = front([Point(each.policy, each.speed, each.loss, 0.0) for each in found], more_is_better=True)
    axes.plot([each.x for each in best], [each.loss for each in best], **FRONT)
    for name, look in drawn.items():
        own = [each for each in found if each.policy == name]
        bars = [[each.loss - each.low for each in own], [each.high - each.loss for each in own]]
        across, up = [each.speed for each in own], [each.loss for each in own]
        axes.errorbar(across, up, yerr=bars, elinewidth=0.8, capsize=2, **_shape(look))


def _shape(look: Look) -> dict[str, Any]:
    return look.line() | {"linestyle": "none", "markersize": 5}
