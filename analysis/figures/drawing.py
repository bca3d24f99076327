"""Pictures of charts by matplotlib: a page measured in inches so that nothing overlaps, its panels, and files."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib import colormaps, style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogFormatter,
    LogFormatterMathtext,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
)
from matplotlib.transforms import ScaledTranslation

from moereplay.analysis.figures.chart import (
    LETTER,
    NO_BREAK,
    TEXT_SIZE,
    Axis,
    Bar,
    Chart,
    Entry,
    Line,
    Panel,
    Series,
    Tile,
    coinciding,
    highest,
    is_narrow,
    page_width,
    places,
    rows_of,
)
from moereplay.analysis.palette import GRID, INK, MUTED, OUTLINE, Look
from moereplay.analysis.tables import csv
from moereplay.results.errors import ResultError
from moereplay.traces.files import write_whole
from moereplay.traces.texts import digits, escaped_lines

DPI = 72  #: of the layout; files have another
#: Settings that must not follow the machine's own; a fixed salt makes SVG ids repeatable.
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.dpi": DPI,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "moereplay",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # names of models and policies may hold dollar signs
    "savefig.dpi": 160,
}
MARGIN, LINE = 0.25, 0.17  # inches: page margin, height of a line of text
GAP, SCALE_GAP = 0.2, 0.75  # inches between columns of panels: without tick labels and with them
TITLE_SIZE, NOTE_SIZE = 12.0, 7.5  # points
AXIS_LABEL, ENTRY = 0.55, 0.185  # inches: below the grid, height of a legend entry
HANDLE, NARROW_ENTRY = 0.45, 0.15  # inches: of a legend entry before its text, and its height on a narrow page
NARROW_LETTER, NARROW_LEFT = 0.53 / 72, 0.8  # as `LETTER`; and additional space for tick labels on a wide page
NARROW_SIZE = 7.0  # points: every text of a page whose width is given
LEAST_HEIGHT, SHAPE = 1.3, 0.75  # inches down, and height by width, of its panels
FIRST = 0.32  #: inches above its first row of panels, at most, for the heading
MARKERS = 16  #: approximate number of markers on a line
MOST_STEPS = 6  #: of a percent axis
TICK_ROOM = 0.29  #: inches between ticks of a percent axis, at least
NEARLY = 0.4  #: part of a step by which a percent axis may be longer, to end on a tick
TICK_LETTER = 1.08  #: width of a digit relative to `LETTER`
MARGINS = 0.05  #: of a horizontal axis, at each end, relative to its values
SMALL = 6.5  #: points: letters of a note above a panel
HIDDEN = 1 / 300  #: of the height of a panel: lines that are this close cover one another
SPREAD = 0.8  #: part of the room between two places over which intervals at one of them lie
BEYOND = 0.95  #: of whole numbers at an end of the axis: less than one, which would have a tick
ABOVE = 1.06  #: room above the highest value
IN_BAR = 7  #: points: letters of a label inside a bar
BAR = 0.72  #: height of a bar, in rows
ROOM, NARROW_ROOM = 1.25, 1.5  #: length of the axis relative to the longest bar, which its label follows
BEHIND_TOTAL = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # a rule may pass there


@contextmanager
def styled() -> Iterator[None]:
    """Apply the same style on every machine, whatever its matplotlibrc says."""
    with style.context(["default", STYLE | ({"font.size": NARROW_SIZE} if is_narrow() else {})]):
        yield


class Picture(Figure):
    """A page and the chart that it shows, from which the CSV is written."""

    chart: Chart


class Sheet:
    """A page with the texts of a chart and empty panels; `panels[row][column]` share axes as the chart says."""

    def __init__(self, chart: Chart, legend: Sequence[Artist]) -> None:
        width, down = page_width.get(), len(chart.rows)
        self._chart, self._narrow = chart, width is not None
        self._gap = SCALE_GAP if chart.scales in ("columns", "each") else GAP  # between columns
        self._above = 0.2 + 0.32 * (down > 1)  # above each row, for a note and the heading
        self._left = chart.left * (NARROW_LEFT if width else 1.0)
        gaps = (len(chart.columns) - 1) * self._gap
        if width:
            across = max(0.5, (width - self._left - MARGIN / 2 - gaps) / len(chart.columns))
            self._panel = across, min(chart.size[1], max(LEAST_HEIGHT, SHAPE * across))
        else:  # as high as the legend at least
            missing = ENTRY * len(legend) + 0.1 - (down * chart.size[1] + (down - 1) * self._above)
            self._panel = chart.size[0], chart.size[1] + max(0.0, missing) / down
        self._across = len(chart.columns) * self._panel[0] + gaps
        self._down = down * self._panel[1] + (down - 1) * self._above
        longest = max((len(str(handle.get_label())) for handle in legend), default=0)
        self._width = width or self._own_width(0.75 + longest * TEXT_SIZE * LETTER if legend else 0)
        entry = HANDLE + longest * NARROW_SIZE * NARROW_LETTER
        self._legend_columns = max(1, int((self._width - MARGIN / 2) / entry))
        texts = ("", "") if self._narrow else (chart.subtitle, chart.note)
        self._subtitle = _wrapped(texts[0], self._width - 2 * MARGIN, TEXT_SIZE)
        self._note = _wrapped(texts[1], self._width - 2 * MARGIN, NOTE_SIZE)
        head = 0.08 if self._narrow else 0.62
        above = min(self._above, FIRST) if self._narrow else self._above  # nothing ends above the first row
        self._top = head + LINE * (len(self._subtitle) + 1.5 * any(chart.columns)) + above
        entries = math.ceil(len(legend) / self._legend_columns) * self._narrow
        below = LINE * len(self._note) + NARROW_ENTRY * entries
        self._height = self._top + self._down + chart.below + AXIS_LABEL + below + MARGIN / 2
        self.figure = Picture(figsize=(self._width, self._height), facecolor="white")
        self.figure.chart = chart
        parts = (f"{chart.title} ({chart.label})", chart.subtitle, chart.note)
        self.figure.set_label("\n".join(filter(None, parts)))
        self.panels = self._panels()
        self._write()
        self._legend(legend)

    def _own_width(self, beside: float) -> float:
        """Return the width that holds the panels with a legend beside them, the title and the headings."""
        chart = self._chart
        title = (len(chart.title) * TITLE_SIZE * 1.1 + len(chart.label) * 8) * LETTER + 1
        heading = self._left + max(map(len, chart.rows)) * TEXT_SIZE * LETTER + MARGIN
        return max(self._left + self._across + beside + MARGIN, title, heading)

    def _panels(self) -> list[list[Axes]]:
        chart, panels = self._chart, list[list[Axes]]()
        for row, heading in enumerate(chart.rows):
            panels.append([])
            for column, title in enumerate(chart.columns):
                first = panels[0][0] if panels[0] else None
                like = {
                    "one": first,
                    "rows": next(iter(panels[-1]), None),
                    "columns": panels[0][column] if row else None,
                    "each": None,
                }
                across = (panels[0][column] if row else None) if chart.own_x else first
                left, top = self._corner(row, column)
                bottom = self._height - top - self._panel[1]
                sizes = (self._width, self._height, self._width, self._height)
                inches = (left, bottom, *self._panel)
                place = tuple(length / whole for length, whole in zip(inches, sizes, strict=True))
                axes = self.figure.add_axes(place, sharex=across, sharey=like[chart.scales])
                labelled = column == 0 or chart.scales in ("columns", "each")
                axes.set_label(", ".join(filter(None, (heading, title))))
                axes.tick_params(labelleft=labelled, labelbottom=row == len(chart.rows) - 1, length=2.5)
                panels[-1].append(axes)
        return panels

    def _corner(self, row: int, column: int) -> tuple[float, float]:
        """Return the upper left corner of a panel, inches from the left and upper edges."""
        across, down = self._panel
        return self._left + column * (across + self._gap), self._top + row * (down + self._above)

    def _write(self) -> None:
        chart, small = self._chart, NARROW_SIZE if self._narrow else 9
        if not self._narrow:
            self._line(chart.title, MARGIN, 0.38, fontsize=TITLE_SIZE, fontweight="bold")
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": MUTED, "linewidth": 0.8}
            self._line(chart.label, self._width - MARGIN - 0.05, 0.36, ha="right", fontsize=8, bbox=box)
        for number, text in enumerate(self._subtitle):
            self._line(text, MARGIN, 0.62 + LINE * number, fontsize=TEXT_SIZE, color=MUTED)
        for number, text in enumerate(reversed(self._note)):
            self._line(text, MARGIN, self._height - MARGIN / 2 - LINE * number, fontsize=NOTE_SIZE, color=MUTED)
        middle = self._left + self._across / 2, self._top + self._down / 2
        below = self._top + self._down + chart.below + 0.42
        self._line(chart.x.named, middle[0], below, ha="center", fontsize=small)
        beside = MARGIN * (0.45 if self._narrow else 0.8)
        self._line(chart.y.named, beside, middle[1], rotation=90, ha="center", va="center", fontsize=small)
        for column, text in enumerate(chart.columns):
            over = self._corner(0, column)[0] + self._panel[0] / 2
            above = self._top - 0.24 - 0.22 * (len(chart.rows) > 1)
            self._line(text, over, above, ha="center", fontsize=small)
        for row, text in enumerate(chart.rows if len(chart.rows) > 1 else ()):
            left, top = self._corner(row, 0)
            room = (self._width - left) / (NARROW_SIZE * LETTER)
            shown = f"{text[: int(room) - 1]}…" if self._narrow and len(text) > room else text
            size = min(TEXT_SIZE, small)
            self._line(shown, left, top - 0.2, fontsize=size, fontweight="bold", color=MUTED)

    def _line(self, text: str, x: float, y: float, **look: Any) -> None:
        """Write a text with its baseline `y` inches below the upper edge."""
        self.figure.text(x / self._width, 1 - y / self._height, text, **look)

    def _legend(self, handles: Sequence[Artist]) -> None:
        if not handles:
            return
        look: dict[str, Any] = {"handles": handles, "frameon": False, "handlelength": 3.2}
        if self._narrow:
            corner = 0.5, MARGIN / 4 / self._height
            look |= {"fontsize": NARROW_SIZE, "handlelength": 2.4, "columnspacing": 1.0, "labelspacing": 0.3}
            columns = self._legend_columns
            self.figure.legend(loc="lower center", bbox_to_anchor=corner, ncols=columns, borderpad=0, **look)
            return
        left = self._left + self._across + 0.1
        corner = left / self._width, 1 - (self._top - 0.05) / self._height
        self.figure.legend(loc="upper left", bbox_to_anchor=corner, **look)


def _wrapped(text: str, inches: float, points: float) -> list[str]:
    return wrap(text, max(20, int(inches / (points * LETTER))), break_long_words=True)


# What panels show


def rendered(chart: Chart) -> Picture:
    """Draw a chart on a page of the current width."""
    chart = chart.stacked() if chart.stacks and is_narrow() else chart
    with styled():
        sheet = Sheet(chart, [_handle(entry) for entry in chart.legend])
        bars = [bar for _, _, panel in chart.cells() for bar in panel.bars]
        ends = [bar.total if bar.high is None else max(bar.total, bar.high) for bar in bars]
        longest = max([1, *ends]) * (NARROW_ROOM if is_narrow() else ROOM)
        for row, column, panel in chart.cells():  # scales first: limits follow from values on their scale
            axes = sheet.panels[row][column]
            _plain(axes, "x", panel.x or chart.x)
            _plain(axes, "y", panel.y or chart.y)
            _fill(axes, panel, longest)
        for row, column, panel in chart.cells():
            axes = sheet.panels[row][column]
            if panel.tiles:
                draw_tiles(axes, panel.tiles)
            elif panel.bars:
                _bar_scales(axes, panel.bars, longest)
            else:
                _scale(axes, chart, panel, chart.sharing(row, column))
            if chart.names_hidden:
                name_hidden(axes, places(panel.series))
    return sheet.figure


def _handle(entry: Entry) -> Artist:
    if isinstance(entry.look, str):
        return Patch(facecolor=entry.look, label=entry.name)
    return Line2D([], [], label=entry.name, **_drawn(entry.look))


def _drawn(look: Look, joined: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of a matplotlib line."""
    shape = look.line() | {"lw": look.width, "markersize": look.size, "alpha": look.alpha}
    shape |= {"linestyle": "none"} if not joined or look.width == 0 else {}
    return shape | ({"markerfacecolor": "none", "markeredgewidth": 0.9} if look.hollow else {})


def _fill(axes: Axes, panel: Panel, longest: float) -> None:
    step = _step(axes, panel.series)
    for at, each in enumerate(panel.series):
        _series(axes, each, at - (len(panel.series) - 1) / 2, step)
    for rule in panel.rules:
        draw = axes.axvline if rule.upright else axes.axhline
        look = rule.look
        draw(rule.at, label=rule.name or None, color=look.colour, linestyle=look.dash, lw=look.width)
    if panel.bars:
        for at, bar in enumerate(panel.bars):
            _bar(axes, bar, at, longest)
        axes.grid(axis="y", visible=False)


def _step(axes: Axes, series: Sequence[Series]) -> float:
    """Return by how many points intervals at one place lie apart: a point, or less where many places are near."""
    places = {point.x for line in series if not line.across for point in line.points if point.low is not None}
    near = axes.bbox.width / DPI * 72 / max(1, len(places))
    return min(1.0, SPREAD * near / max(1, len(series)))


def _series(axes: Axes, series: Series, aside: float, step: float) -> None:
    """Draw a line, with its intervals moved aside by so many steps, so that those at one place are all seen."""
    if not series.points:
        return
    x = np.array([point.x for point in series.points], float)
    y = np.array([np.nan if point.y is None else point.y for point in series.points], float)
    shape = _drawn(series.look, series.joined)
    if series.look.marker:
        shape |= {"clip_on": False, "markevery": max(1, len(x) // MARKERS) if series.joined else 1}
    if series.behind:
        shape |= {"zorder": 1}
    axes.plot(x, y, label=series.name or None, **shape)
    known = [point for point in series.points if point.low is not None and point.high is not None]
    if known:
        places, low, high = np.array(
            [((point.x, point.y)[series.across], point.low, point.high) for point in known], float
        ).T
        look = {"colors": series.look.colour, "linewidth": min(1.1, 1.1 * step), "alpha": 0.75, "zorder": 1.9}
        aside *= step
        draw = axes.hlines if series.across else axes.vlines
        moved = ScaledTranslation(*((0, aside / 72) if series.across else (aside / 72, 0)), axes.figure.dpi_scale_trans)
        look["transform"] = axes.transData + moved
        draw(places, low, high, label=f"_ends of {series.name}", **look)


def _bar(axes: Axes, bar: Bar, at: int, longest: float) -> None:
    left: float = 0
    for part in bar.parts:
        axes.barh(at, part.size, left=left, height=BAR, color=part.colour, label=part.name)
        left += part.size
        inches = part.size / longest * axes.bbox.width / DPI
        if part.labelled and inches > (len(_worded(part.size)) + 1) * IN_BAR * LETTER:
            middle = left - part.size / 2
            axes.text(middle, at, _worded(part.size), va="center", ha="center", fontsize=IN_BAR, color="white")
    end = left if bar.high is None else bar.high
    if bar.low is not None:
        axes.hlines(at, bar.low, end, colors=INK, linewidth=1.1, label=f"_ends of {bar.name}")
    letters = {"fontsize": SMALL if is_narrow() else 7.5, "fontweight": "bold", "va": "center"}
    axes.text(end + longest / 80, at, _worded(left), bbox=BEHIND_TOTAL, **letters)


def _worded(value: float) -> str:
    """Return a count with every digit, and any other number with three."""
    return f"{value:,}" if isinstance(value, int) else digits(value, 3)


def _scale(axes: Axes, chart: Chart, panel: Panel, sharing: Sequence[Panel]) -> None:
    x, y = panel.x or chart.x, panel.y or chart.y
    if x.format == "whole":
        last = max(point.x for _, _, each in chart.cells() for series in each.series for point in series.points)
        beyond = min(0.5 + last / 60, BEYOND)
        axes.set_xlim(-beyond, last + beyond)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    if x.ticks:
        own = [panel] if chart.own_x else [each for _, _, each in chart.cells()]
        places = [point.x for each in own for series in each.series for point in series.points]
        _ticks(axes, x, (min(places), max(places)))
    if y.zero and y.format == "share":
        from_zero(axes, highest(sharing))
    elif y.zero and y.format == "number":
        axes.set_ylim(0, ABOVE * highest(sharing) or 1)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    elif y.zero:
        axes.set_ylim(bottom=0)


def _plain(axes: Axes, name: str, axis: Axis) -> None:
    """Set scale, limits and the format of numbers, as far as these do not follow from values."""
    more = {"linthresh": axis.linear_within} if axis.scale == "symlog" else {}
    getattr(axes, f"set_{name}scale")(axis.scale, **more)
    if axis.limits is not None:
        axes.set(**{f"{name}lim": axis.limits})
    if axis.format == "number" and not axis.zero:
        getattr(axes, f"{name}axis").set_major_formatter(StrMethodFormatter("{x:,.4g}"))


def _bar_scales(axes: Axes, bars: Sequence[Bar], longest: float) -> None:
    axes.set_xlim(0, longest)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _ticks(axes: Axes, axis: Axis, ends: tuple[float, float]) -> None:
    """Label the ticks whose labels do not touch; the others are small, further ones fill the gaps."""
    words = {tick.at: tick.word for tick in (*axis.ticks, *axis.more_ticks)}
    scale = math.log if axis.scale == "log" else float
    inches = float(axes.bbox.width) / DPI / (1 + 2 * MARGINS)
    places = sorted(tick.at for tick in axis.ticks)
    kept = _apart(places, scale, words.__getitem__, inches, ends)
    for tick in axis.more_ticks:
        more = sorted({*kept, tick.at})
        kept = more if _apart(more, scale, words.__getitem__, inches, ends) == more else kept
    axes.set_xticks(kept)
    axes.minorticks_off()
    axes.set_xticks([place for place in places if place not in kept], minor=True)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.get(value, "")))


def _apart(
    values: Sequence[float],
    scale: Callable[[float], float],
    word: Callable[[float], str],
    inches: float,
    ends: tuple[float, float],
) -> list[float]:
    """Return the rising values whose labels are far enough apart."""
    length = (scale(ends[1]) - scale(ends[0])) or 1.0
    kept = list(values[:1])
    for value in values[1:]:
        letters = (len(word(value)) + len(word(kept[-1]))) / 2 + 1
        if inches * (scale(value) - scale(kept[-1])) / length >= letters * TEXT_SIZE * LETTER * TICK_LETTER:
            kept.append(value)
    return kept


def from_zero(axes: Axes, top: float) -> None:
    """Set a percent axis from zero with room above the highest value; a tick that is nearly reached is shown."""
    end = top * ABOVE if top > 0 else 0.05
    room = int(axes.bbox.height / DPI / TICK_ROOM)
    most, whole = min(max(2, room), MOST_STEPS), top or end
    power = math.floor(math.log10(whole / most))
    step = next(step for step in (factor * 10.0**power for factor in (1, 2, 5, 10)) if whole / step <= most)
    count = min(math.floor(end / step + NEARLY), round(1 / step))  # no ratio is above 100 %
    axes.set_ylim(0, max(end, count * step))
    axes.set_yticks([step * number for number in range(count + 1)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))


def name_hidden(axes: Axes, lines: Mapping[str, Line]) -> None:
    """Name coinciding lines above the panel, as space permits: only the last one drawn is visible."""
    bottom, top = axes.get_ylim()
    groups, exact = coinciding(lines, (top - bottom) * HIDDEN * (axes.get_yscale() == "linear")), coinciding(lines)
    room = axes.bbox.width / DPI / (SMALL * LETTER)
    text = "; ".join((" = " if names in exact else " ≈ ").join(names) for names in groups)
    note = text if len(text) <= room else f"{text[: int(room) - 2].rpartition(' ')[0]} …"
    axes.text(0, 1.015, note, transform=axes.transAxes, fontsize=SMALL, color=MUTED, va="bottom")


# Files

#: Metadata of each kind of file, without dates and versions, so that the same figure gives the same bytes.
KINDS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `stem.KIND` for each kind, each whole or not at all; the same figure gives the same bytes.

    Raises ResultError if they cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    rendered = [_rendered(figure, kind, KINDS[kind]) for kind in kinds]
    for path, data in zip(paths, rendered, strict=True):
        _replace(path, data)
    return paths


def save_caption(figure: Figure, stem: Path) -> Path:
    """Write title, label and notes as `stem.txt`, for pages of a given width, which do not show them.

    Raises ResultError if it cannot be written.
    """
    path = stem.with_name(f"{stem.name}.txt")
    _replace(path, f"{escaped_lines(str(figure.get_label()).replace(NO_BREAK, ' '))}\n".encode())
    return path


def save_numbers(figure: Picture, stem: Path) -> Path:
    """Write the data of the chart as `stem.csv`. Raises ResultError if it cannot be written."""
    path = stem.with_name(f"{stem.name}.csv")
    _replace(path, f"{csv(rows_of(figure.chart))}\n".encode())
    return path


def _rendered(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    _make_plain(figure)
    with styled():
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def _make_plain(figure: Figure) -> None:
    """Escape characters that SVG cannot hold, and label logarithmic axes without mathematical notation."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(escaped_lines(text.get_text().replace(NO_BREAK, " ")))  # lines are broken by now
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(LogFormatter())
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(LogFormatter())


def _replace(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}; choose another folder") from None


# -- Maps: a coloured cell for each pair of words, with its value in it


COLOURS = colormaps["viridis"]  #: dark is little; even to those who see few colours
LIGHT = 0.55  #: from this part of the scale on, letters are dark


def draw_tiles(axes: Axes, tiles: Sequence[Tile]) -> None:
    """Draw the map; colours are on a logarithmic scale, from the least to the largest value."""
    columns, rows = (list(dict.fromkeys(getattr(tile, name) for tile in tiles)) for name in ("column", "row"))
    known = [tile.value for tile in tiles if tile.value > 0]
    least, most = min(known, default=1.0), max(known, default=1.0)
    for tile in tiles:
        at = columns.index(tile.column), rows.index(tile.row)
        if tile.value > 0:
            level = math.log(tile.value / least) / math.log(most / least) if most > least else 1.0
            axes.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=COLOURS(level), edgecolor="white"))
            letters = INK if level >= LIGHT else "white"
            axes.text(*at, digits(tile.value, 3), ha="center", va="center", fontsize=7.5, color=letters)
        else:
            axes.text(*at, "-", ha="center", va="center", fontsize=7.5, color=INK)
    for tile in tiles:
        if tile.outlined:
            corner = columns.index(tile.column) - 0.5, rows.index(tile.row) - 0.5
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=OUTLINE, linewidth=2.2, zorder=3))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.grid(visible=False)
