"""A figure as a value: panels of series over axes. Pictures, CSV files and the pages of `report` are made from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from moereplay.analysis.palette import Look

COLUMNS = ("panel", "name", "part", "x", "y", "low", "high")  #: of the CSV
DECADE = 10  #: ratio of the largest to the smallest value from which an axis is logarithmic
NO_BREAK = "\N{NO-BREAK SPACE}"  #: keeps a field on one line
TEXT_SIZE, LETTER = 8.5, 0.6 / 72  #: points of text; inches of a letter's width per point of its size, rounded up
#: Width in inches of the pages being drawn; None for as wide as they need.
page_width: ContextVar[float | None] = ContextVar("page_width", default=None)


@contextmanager
def on_page(width: float | None) -> Iterator[None]:
    """Draw pages of a given width in inches, such as a column of a paper; None for as wide as they need.

    Such pages have 7-point letters and the legend below; `save_caption` writes their title and notes.
    """
    before = page_width.set(width)
    try:
        yield
    finally:
        page_width.reset(before)


def is_narrow() -> bool:
    """Return whether pages have a given width, such as a column of a paper."""
    return page_width.get() is not None


class Tick(NamedTuple):
    """A labelled place on an axis."""

    at: float
    word: str


@dataclass(frozen=True)
class Axis:
    """A quantity: its title, the format of its numbers, and its scale."""

    title: str = ""
    format: Literal["", "number", "share", "whole"] = ""  #: empty: as the renderer likes
    scale: Literal["linear", "log", "symlog"] = "linear"
    zero: bool = False  #: whether it begins at zero
    limits: tuple[float, float] | None = None
    linear_within: float = 1.0  #: of symlog
    ticks: Sequence[Tick] = ()  #: labelled where labels do not touch, else small; none: as the renderer likes
    more_ticks: Sequence[Tick] = ()  #: drawn where there is room between those
    suffix: str = ""  #: of its numbers

    @property
    def named(self) -> str:
        """The title, with a note if the scale is logarithmic."""
        return f"{self.title} (log)" if self.scale == "log" and self.title else self.title


class Point(NamedTuple):
    """A value; `y` is None for a gap in a line."""

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    identity: str = ""  #: of the replay that it belongs to


@dataclass(frozen=True)
class Series:
    """A line, or points that no line joins."""

    name: str  #: empty for guides, which are not part of the data
    look: Look
    points: Sequence[Point]
    joined: bool = True
    across: bool = False  #: whether intervals lie along the horizontal axis
    behind: bool = False  #: whether it lies below all other series
    measured: bool = True  #: False for bounds and curves: lines without points of their own


@dataclass(frozen=True)
class Rule:
    """A line across a whole panel."""

    at: float
    look: Look
    name: str = ""  #: empty for guides
    upright: bool = False


class Part(NamedTuple):
    """A piece of a stacked bar."""

    name: str
    size: float
    colour: str
    labelled: bool = False  #: whether its size is written into it, if there is room


@dataclass(frozen=True)
class Bar:
    """A stacked horizontal bar, with the interval of its total."""

    name: str
    parts: Sequence[Part]
    low: float | None = None
    high: float | None = None

    @property
    def total(self) -> float:
        """The sum of its parts."""
        return sum(part.size for part in self.parts)


class Tile(NamedTuple):
    """A cell of a map over two lists of words, with its value."""

    column: str
    row: str
    value: float
    outlined: bool = False


@dataclass(frozen=True)
class Panel:
    """The contents of one pair of axes, from back to front."""

    series: Sequence[Series] = ()
    rules: Sequence[Rule] = ()
    bars: Sequence[Bar] = ()
    tiles: Sequence[Tile] = ()  #: columns and rows in their order, the first row at the bottom
    x: Axis | None = None  #: instead of the chart's
    y: Axis | None = None  #: instead of the chart's


class Entry(NamedTuple):
    """A line of the legend; a colour alone is a patch."""

    name: str
    look: Look | str


@dataclass(frozen=True)
class Chart:
    """A whole figure."""

    title: str
    subtitle: str = ""
    label: str = ""  #: SIMULATED, LIVE, ...
    note: str = ""
    x: Axis = Axis()
    y: Axis = Axis()
    columns: Sequence[str] = ("",)  #: a title above each column of panels
    rows: Sequence[str] = ("",)  #: a heading above each row, if there are several
    panels: Sequence[Sequence[Panel]] = ((Panel(),),)  #: by row and column
    legend: Sequence[Entry] = ()
    size: tuple[float, float] = (6.0, 3.4)  #: inches of a panel
    left: float = 0.85  #: inches for tick labels
    below: float = 0.0  #: inches for tick labels that stand upright
    scales: Literal["one", "rows", "columns", "each"] = "one"  #: panels that share a vertical scale
    own_x: bool = False  #: whether each column has its own horizontal scale
    names_hidden: bool = False  #: whether lines that hide one another are named above a panel
    stacks: bool = False  #: whether the panels of a row lie below one another on a narrow page

    def stacked(self) -> Chart:
        """Return the chart with one column of panels, whose headings begin with the titles of their columns."""
        return replace(
            self,
            columns=("",),
            rows=[", ".join(filter(None, (column, row))) for row in self.rows for column in self.columns],
            panels=[[panel] for panels in self.panels for panel in panels],
            scales="each" if self.scales == "columns" else self.scales,
        )

    def cells(self) -> Iterator[tuple[int, int, Panel]]:
        """Yield every panel with its row and column."""
        for row, panels in enumerate(self.panels):
            for column, panel in enumerate(panels):
                yield row, column, panel

    def sharing(self, row: int, column: int) -> list[Panel]:
        """Return the panels that share the vertical scale of one."""
        alike = {
            "one": lambda r, c: True,
            "rows": lambda r, c: r == row,
            "columns": lambda r, c: c == column,
            "each": lambda r, c: (r, c) == (row, column),
        }[self.scales]
        return [panel for r, c, panel in self.cells() if alike(r, c)]

    def name_of(self, row: int, column: int) -> str:
        """Return the name of a panel."""
        return ", ".join(filter(None, (self.rows[row], self.columns[column])))


def highest(panels: Sequence[Panel]) -> float:
    """Return the largest value of series, intervals included; 0 without any."""
    points = [point for panel in panels for line in panel.series for point in line.points]
    return max((end for point in points for end in (point.y, point.high) if end is not None), default=0.0)


Line = Sequence[tuple[float, float | None]]  #: places (x, y); y is None for a gap


def coinciding(lines: Mapping[str, Line], within: float = 0.0) -> list[list[str]]:
    """Return the names of lines that hide one another: whose values differ by no more than `within`."""
    alike: list[list[str]] = []
    for name, line in lines.items():
        group = next((each for each in alike if _is_close(line, lines[each[0]], within)), None)
        if group is None:
            alike.append([name])
        else:
            group.append(name)
    return [names for names in alike if len(names) > 1]


def _is_close(one: Line, other: Line, within: float) -> bool:
    return len(one) == len(other) and all(
        x == at and (y == value or (y is not None and value is not None and abs(y - value) <= within))
        for (x, y), (at, value) in zip(one, other, strict=True)
    )


def places(series: Sequence[Series]) -> dict[str, Line]:
    """Return the points of measured lines, for `coinciding`."""
    return {line.name: [point[:2] for point in line.points] for line in series if line.measured and line.name}


FAR = 5  #: times the highest value of a panel: above it, panels do not share a scale
OWN_SCALES = "Each panel has its own vertical scale."


def spans_a_decade(values: Sequence[float]) -> bool:
    """Return whether an axis of these values should be logarithmic."""
    return max(values) > DECADE * min(values)


def far_apart(rows: Sequence[Sequence[Panel]]) -> bool:
    """Return whether lines of some panel of a column would lie flat on the scale of another."""
    columns = ([highest([panel]) for panel in column] for column in zip(*rows, strict=True))
    return any(max(ends) > FAR * min(ends) for ends in columns)


Row = dict[str, Any]


def rows_of(chart: Chart) -> list[Row]:
    """Return a row per point, rule and part of a bar, panel by panel, with every digit."""
    return [
        dict.fromkeys(COLUMNS) | {"panel": chart.name_of(row, column)} | each
        for row, column, panel in chart.cells()
        for each in _rows(panel)
    ]


def _rows(panel: Panel) -> Iterator[Row]:
    for line in panel.series:
        for point in line.points if line.name else ():
            if point.y is not None:
                ends = {"low": point.low, "high": point.high}
                yield {"name": line.name, "x": _number(point.x), "y": _number(point.y), **ends}
    for rule in panel.rules:
        if rule.name:
            yield {"name": rule.name, ("x" if rule.upright else "y"): _number(rule.at)}
    for bar in panel.bars:
        for part in bar.parts:
            yield {"name": bar.name, "part": part.name, "x": part.size}
    for bar in panel.bars:
        if bar.low is not None and bar.high is not None:
            yield {"name": bar.name, "part": "interval", "low": _number(bar.low), "high": _number(bar.high)}
    for tile in panel.tiles:
        yield {"name": tile.row, "part": tile.column, "y": _number(tile.value)}


def _number(value: float) -> float | int:
    number = float(value)
    return int(number) if number.is_integer() else number


def legend(looks: Mapping[str, Look]) -> list[Entry]:
    """Return an entry per name, with its marker a little larger than in the panels."""
    return [Entry(name, look.scaled(5.0)) for name, look in looks.items()]
