"""A line per policy in a panel, and a word about those that lie on one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from moereplay.analysis.figures.ends import bars
from moereplay.analysis.figures.sheet import DPI, LETTER, TEXT_SIZE
from moereplay.analysis.palette import INK, MUTED, Look

MARKERS = 16  #: about so many per line
MOST_STEPS = 6  #: of a percent axis
LOG_FROM = 10  #: ratio of the largest to the smallest value from which an axis is logarithmic
TICK_ROOM = 0.29  #: inches between ticks of a percent axis, at least
NEARLY = 0.4  #: part of a step by which such an axis may be longer, to end on a tick
RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 9,
    "markerfacecolor": "none",
    "markeredgecolor": INK,
    "markeredgewidth": 0.9,
    "clip_on": False,
}
TICK_LETTER = 1.08  #: width of a digit beside `LETTER`
SMALL = 6.5  #: points: letters of a note above a panel


def plot(axes: Axes, rows: pl.DataFrame, x: str, y: str, drawn: dict[str, Look], points: Collection[str] = ()) -> None:
    """The rows of a panel as one line per `eviction`, of `points` the markers alone; null leaves a gap."""
    seen: dict[tuple[tuple[float, float | None], ...], list[str]] = {}
    for name, look in drawn.items():
        line = rows.filter(pl.col("eviction") == name).sort(x)
        if line.is_empty():
            continue
        values = line[y].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        marks = {"markevery": max(1, len(line) // MARKERS), "markersize": 4, "clip_on": False}
        shape = look.line() | ({"linestyle": "none", "markevery": 1} if name in points else {})
        axes.plot(line[x].to_numpy(), values, **(marks | shape), label=name, lw=1.4)
        bars(axes, line, x, y, look.colour, name)
        seen.setdefault(tuple(zip(line[x], line[y], strict=True)), []).append(name)
    _name_equals(axes, [names for names in seen.values() if len(names) > 1])


def rings(axes: Axes, rows: pl.DataFrame, x: str, y: str, identities: Collection[str]) -> None:
    """A ring around the points of these configurations."""
    marked = rows.filter(pl.col("identity").is_in(list(identities)))
    if not marked.is_empty():
        axes.plot(marked[x].to_numpy(), marked[y].cast(pl.Float64).to_numpy(), **RING)


def ring_handles(identities: Collection[str]) -> list[Line2D]:
    """A legend entry if anything is ringed."""
    return [Line2D([], [], **RING, label="checked")] if identities else []


def panel_size(rows: int, columns: int) -> tuple[float, float]:
    """Inches across and down that suit so many panels."""
    return 6.0 if columns == 1 else 3.0, 3.4 if rows == columns == 1 else 2.1


def legend(drawn: dict[str, Look]) -> list[Line2D]:
    """Legend handles, one per label of `drawn`, with the line and marker of its look."""
    return [Line2D([], [], label=name, **look.line(), lw=1.4, markersize=5) for name, look in drawn.items()]


def apart(
    values: Sequence[float],
    scale: Callable[[float], float],
    word: Callable[[float], str],
    inches: float,
    ends: Sequence[float] = (),
) -> list[float]:
    """Ticks whose labels do not touch: the first of the rising values, and each far enough from the one before.

    `word` gives a tick's label, `inches` is the length of the axis, `ends` are its own if it goes beyond the values.
    """
    lowest, highest = ends or (values[0], values[-1])
    length = (scale(highest) - scale(lowest)) or 1.0
    kept = list(values[:1])
    for value in values[1:]:
        letters = (len(word(value)) + len(word(kept[-1]))) / 2 + 1
        if inches * (scale(value) - scale(kept[-1])) / length >= letters * TEXT_SIZE * LETTER * TICK_LETTER:
            kept.append(value)
    return kept


def from_zero(axes: Axes, highest: float) -> None:
    """A percent axis from zero with room above the highest value; a tick that is nearly reached is shown."""
    end = highest * 1.06 if highest > 0 else 0.05
    room = int(axes.bbox.height / DPI / TICK_ROOM)
    step = _step(highest or end, min(max(2, room), MOST_STEPS))
    count = min(math.floor(end / step + NEARLY), round(1 / step))  # no ratio is above 100 %
    axes.set_ylim(0, max(end, count * step))
    axes.set_yticks([step * number for number in range(count + 1)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))


def _step(highest: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that needs no more than `most` steps."""
    power = math.floor(math.log10(highest / most))
    return next(step for step in (factor * 10.0**power for factor in (1, 2, 5, 10)) if highest / step <= most)


def axis_name(name: str, logarithmic: bool) -> str:
    """The label of an axis."""
    return f"{name} (log)" if logarithmic else name


def spans_a_decade(values: Sequence[float]) -> bool:
    """Whether an axis of these values is logarithmic."""
    return max(values) > LOG_FROM * min(values)


def _name_equals(axes: Axes, groups: list[list[str]]) -> None:
    """Which lines hide one another, as far as the panel is wide: only the last one drawn shows."""
    room = axes.bbox.width / DPI / (SMALL * LETTER)
    text = "; ".join(" = ".join(names) for names in groups)
    note = text if len(text) <= room else f"{text[: int(room) - 2].rpartition(' = ')[0]} = …"
    axes.text(0, 1.015, note, transform=axes.transAxes, fontsize=SMALL, color=MUTED, va="bottom")
