"""Bars over names, with the published range of each as a mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from moereplay.analysis.palette import INK, Look

WIDTH, SMALL = 0.8, 6.0  #: of a group of bars, and points of the letters above one
MOST_LETTERS, MOST_NAMES = 13, 6  #: of names that fit below a panel; longer ones stand in the legend alone


def legend(looks: Mapping[str, Look]) -> list[Patch]:
    """A patch per series."""
    return [Patch(label=name, **face) for name, face in _faces(looks).items()]


def _faces(looks: Mapping[str, Look]) -> dict[str, dict[str, Any]]:
    """Keyword arguments of each series' bars; one whose colour another has is hatched."""
    taken: set[str] = set()
    faces: dict[str, dict[str, Any]] = {}
    for name, look in looks.items():
        hatch = {"hatch": "//", "edgecolor": "white"} if look.colour in taken else {}
        faces[name] = {"facecolor": look.colour, "linewidth": 0} | hatch
        taken.add(look.colour)
    return faces


def draw(axes: Axes, rows: pl.DataFrame, published: pl.DataFrame, value: str, looks: Mapping[str, Look]) -> None:
    """The series of a name stand side by side; a value that is undefined leaves a gap."""
    names = rows["x"].unique(maintain_order=True).to_list()
    spots, faces = _spots(rows, names), _faces(looks)
    marks = {(mark["series"], mark["x"]): (mark["low"], mark["high"]) for mark in _marks(published, value)}
    for (series, name), (middle, width) in spots.items():
        found = rows.filter((pl.col("series") == series) & (pl.col("x") == name))[value].drop_nulls()
        ends = marks.get((series, name), ())
        if ends:
            _mark(axes, middle, width, *ends)
        if len(found):
            axes.bar(middle, found[0], 0.9 * width, **faces[series])
            axes.annotate(_short(found[0], value), (middle, _above(found[0], ends)), (0, 1), fontsize=SMALL, **_ABOVE)
    _ticks(axes, names)


def _marks(published: pl.DataFrame, value: str) -> list[dict[str, Any]]:
    return published.filter(pl.col("value") == value).to_dicts() if len(published) else []


def _above(top: float, ends: Sequence[float]) -> float:
    """Where a number can be read: above its bar, and above the mark that the bar's top is in."""
    return ends[1] if ends and ends[0] <= top <= ends[1] else top


def _spots(rows: pl.DataFrame, names: Sequence[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """Middle and width of the bar of each (series, name)."""
    spots = {}
    for at, name in enumerate(names):
        series = rows.filter(pl.col("x") == name)["series"].unique(maintain_order=True).to_list()
        width = WIDTH / len(series)
        for place, each in enumerate(series):
            spots[each, name] = (at - WIDTH / 2 + (place + 0.5) * width, width)
    return spots


def _mark(axes: Axes, middle: float, width: float, low: float, high: float) -> None:
    axes.plot([middle, middle], [low, high], color=INK, lw=1.2, zorder=3)
    for end in (low, high):
        axes.plot([middle - 0.35 * width, middle + 0.35 * width], [end, end], color=INK, lw=1.6, zorder=3)


def _ticks(axes: Axes, names: Sequence[str]) -> None:
    fits = len(names) <= MOST_NAMES and max(map(len, names)) <= MOST_LETTERS
    axes.set_xticks(range(len(names)), names if fits else [""] * len(names), fontsize=SMALL + 1)
    axes.grid(visible=False, axis="x")


def _short(number: float, value: str) -> str:
    if value in ("hit_rate", "collisions_per_miss"):
        return f"{100 * number:.3g}"
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


_ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom", "color": INK}
