"""What a figure shows as rows: every point of every line with its interval, and every part of every bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

ENDS = "_ends of "  #: begins the label of a line's intervals, which no legend shows
COLUMNS = ("panel", "name", "part", "x", "y", "low", "high")

Row = dict[str, Any]


def rows_of(figure: Figure) -> list[Row]:
    """Return a row per point that is drawn, panel by panel; coordinates are those of the axes."""
    return [
        dict.fromkeys(COLUMNS) | {"panel": str(axes.get_label())} | row
        for axes in figure.axes
        for row in (*_points(axes), *_parts(axes))
    ]


def _points(axes: Axes) -> Iterator[Row]:
    ends = _ends(axes)
    for line in axes.get_lines():
        name = str(line.get_label())
        if name.startswith("_"):
            continue
        if line.get_transform() != axes.transData:  # a line across the panel
            yield {"name": name, "x": _number(line.get_xdata()[0])}  # type: ignore[index]
            continue
        for x, y in zip(np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float), strict=True):
            low, high = ends.get((name, float(x)), (None, None))
            if not np.isnan(y):
                yield {"name": name, "x": _number(x), "y": _number(y), "low": low, "high": high}


def _ends(axes: Axes) -> dict[tuple[str, float], tuple[float, float]]:
    """The interval at each place of each line."""
    return {(name, float(below[0])): (float(below[1]), float(above[1])) for name, below, above in _segments(axes)}


def _segments(axes: Axes) -> Iterator[tuple[str, Any, Any]]:
    for drawn in axes.collections:
        name = str(drawn.get_label())
        if isinstance(drawn, LineCollection) and name.startswith(ENDS):
            yield from ((name.removeprefix(ENDS), below, above) for below, above in drawn.get_segments())


def _parts(axes: Axes) -> Iterator[Row]:
    """The parts of horizontal bars, and the interval of each whole."""
    names = {
        round(float(at)): text.get_text() for at, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=False)
    }
    for container in axes.containers:
        for bar in container.patches if isinstance(container, BarContainer) else ():
            at = round(bar.get_y() + bar.get_height() / 2)
            yield {"name": names.get(at, ""), "part": str(container.get_label()), "x": _number(bar.get_width())}
    if axes.containers:
        for name, below, above in _segments(axes):
            yield {"name": name, "part": "interval", "low": _number(below[0]), "high": _number(above[0])}


def _number(value: Any) -> float | int:
    """Whole numbers as such."""
    number = float(value)
    return int(number) if number.is_integer() else number
