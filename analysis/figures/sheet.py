"""A page of panels, measured in inches so that nothing overlaps: header, grid, headings, legend, note."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import ceil
from textwrap import wrap
from typing import Any, Generic, Literal, TypeVar

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moereplay.analysis.palette import GRID, INK, MUTED

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
NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps a field on one line
MARGIN, LINE = 0.25, 0.17  # inches: page margin, height of a line of text
GAP, SCALE_GAP = 0.2, 0.75  # inches between columns of panels: without tick labels and with them
TITLE_SIZE, TEXT_SIZE, NOTE_SIZE = 12.0, 8.5, 7.5  # points
LETTER = 0.6 / 72  # inches: width of a DejaVu Sans letter per point of its size, rounded up
AXIS_LABEL, ENTRY = 0.55, 0.185  # inches: below the grid, height of a legend entry
HANDLE, NARROW_ENTRY = 0.45, 0.15  # inches: of a legend entry before its text, and its height on a narrow page
NARROW_LETTER, NARROW_LEFT = 0.53 / 72, 0.8  # as `LETTER`; and additional space for tick labels on a wide page
NARROW_SIZE = 7.0  # points: every text of a page whose width is given
LEAST_HEIGHT, SHAPE = 1.3, 0.75  # inches down, and height by width, of its panels
#: Width in inches of the pages being drawn; None for as wide as they need.
_width: ContextVar[float | None] = ContextVar("width", default=None)


def is_narrow() -> bool:
    """Return whether pages have a given width, such as a column of a paper."""
    return _width.get() is not None


@dataclass(frozen=True)
class Wording:
    """Texts of a page."""

    title: str
    subtitle: str
    label: str
    x: str
    y: str
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """Panels of one size in inches; `left` is the room for tick labels."""

    columns: Sequence[str]  #: a title above each column
    rows: Sequence[str]  #: a heading above each row, none if there is one row only
    panel: tuple[float, float]
    left: float = 0.85
    scales: Literal["one", "rows", "columns", "each"] = (
        "one"  #: a vertical scale for all, or for each row, column, panel
    )
    own_x: bool = False  #: whether each column has its own horizontal scale
    below: float = 0.0  #: inches for tick labels that stand upright

    @property
    def gap(self) -> float:
        """Room between columns of panels."""
        return SCALE_GAP if self.scales in ("columns", "each") else GAP

    @property
    def above(self) -> float:
        """Room above each row of panels, for a note and the heading."""
        return 0.2 + 0.32 * (len(self.rows) > 1)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of all panels and the gaps between them."""
        across, down = len(self.columns), len(self.rows)
        return across * self.panel[0] + (across - 1) * self.gap, down * self.panel[1] + (down - 1) * self.above

    def fitted(self, width: float) -> Grid:
        """Return the grid for a page of a given width."""
        many = len(self.columns)
        left = NARROW_LEFT * self.left
        across = max(0.5, (width - left - MARGIN / 2 - (many - 1) * self.gap) / many)
        return replace(self, left=left, panel=(across, min(self.panel[1], max(LEAST_HEIGHT, SHAPE * across))))

    def stretched(self, height: float) -> Grid:
        """Return the grid with at least a given height."""
        more = max(0.0, height - self.size[1]) / len(self.rows)
        return replace(self, panel=(self.panel[0], self.panel[1] + more))


Kind = TypeVar("Kind", bound=Figure)


class Sheet(Generic[Kind]):
    """A figure with empty panels; `panels[row][column]` share axes as the grid says."""

    def __init__(self, grid: Grid, wording: Wording, legend: Sequence[Artist], kind: type[Kind] = Figure) -> None:
        width = _width.get()
        self._narrow = width is not None
        self._grid = grid.fitted(width) if width else grid.stretched(ENTRY * len(legend) + 0.1)
        self._wording = wording
        self.width = width or self._width(legend)
        texts = ("", "") if self._narrow else (wording.subtitle, wording.note)
        self._subtitle = _wrapped(texts[0], self.width - 2 * MARGIN, TEXT_SIZE)
        self._note = _wrapped(texts[1], self.width - 2 * MARGIN, NOTE_SIZE)
        head = 0.08 if self._narrow else 0.62
        self._top = head + LINE * (len(self._subtitle) + 1.5 * any(grid.columns)) + self._grid.above
        below = LINE * len(self._note) + NARROW_ENTRY * self._legend_rows(legend) * self._narrow
        self.height = self._top + self._grid.size[1] + self._grid.below + AXIS_LABEL + below + MARGIN / 2
        self.figure = kind(figsize=(self.width, self.height), facecolor="white")
        parts = (f"{wording.title} ({wording.label})", wording.subtitle, wording.note)
        self.figure.set_label("\n".join(filter(None, parts)))
        self.panels = self._panels()
        self._write()
        self._legend(legend)

    def _legend_columns(self, legend: Sequence[Artist]) -> int:
        longest = max((len(str(handle.get_label())) for handle in legend), default=0)
        return max(1, int((self.width - MARGIN / 2) / (HANDLE + longest * NARROW_SIZE * NARROW_LETTER)))

    def _legend_rows(self, legend: Sequence[Artist]) -> int:
        return ceil(len(legend) / self._legend_columns(legend))

    def _width(self, legend: Sequence[Artist]) -> float:
        longest = max((len(str(handle.get_label())) for handle in legend), default=0)
        beside = 0.75 + longest * TEXT_SIZE * LETTER if legend else 0
        title = (len(self._wording.title) * TITLE_SIZE * 1.1 + len(self._wording.label) * 8) * LETTER + 1
        heading = self._grid.left + max(map(len, self._grid.rows)) * TEXT_SIZE * LETTER + MARGIN
        return max(self._grid.left + self._grid.size[0] + beside + MARGIN, title, heading)

    def _panels(self) -> list[list[Axes]]:
        panels: list[list[Axes]] = []
        for row in range(len(self._grid.rows)):
            panels.append([])
            for column in range(len(self._grid.columns)):
                first = panels[0][0] if panels[0] else None
                like = {
                    "one": first,
                    "rows": next(iter(panels[-1]), None),
                    "columns": panels[0][column] if row else None,
                    "each": None,
                }
                scale = like[self._grid.scales]
                across = (panels[0][column] if row else None) if self._grid.own_x else first
                axes = self.figure.add_axes(self._place(row, column), sharex=across, sharey=scale)
                left = column == 0 or self._grid.scales in ("columns", "each")
                axes.set_label(", ".join(filter(None, (self._grid.rows[row], self._grid.columns[column]))))
                axes.tick_params(labelleft=left, labelbottom=row == len(self._grid.rows) - 1, length=2.5)
                panels[-1].append(axes)
        return panels

    def _corner(self, row: int, column: int) -> tuple[float, float]:
        """Return the upper left corner of a panel, inches from the left and upper edges."""
        across, down = self._grid.panel
        return self._grid.left + column * (across + self._grid.gap), self._top + row * (down + self._grid.above)

    def _place(self, row: int, column: int) -> tuple[float, float, float, float]:
        """Return left, bottom, width and height as fractions of the figure."""
        (across, down), (left, top) = self._grid.panel, self._corner(row, column)
        bottom = self.height - top - down
        return left / self.width, bottom / self.height, across / self.width, down / self.height

    def _write(self) -> None:
        if not self._narrow:
            self._line(self._wording.title, MARGIN, 0.38, fontsize=TITLE_SIZE, fontweight="bold")
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": MUTED, "linewidth": 0.8}
            self._line(self._wording.label, self.width - MARGIN - 0.05, 0.36, ha="right", fontsize=8, bbox=box)
        for number, text in enumerate(self._subtitle):
            self._line(text, MARGIN, 0.62 + LINE * number, fontsize=TEXT_SIZE, color=MUTED)
        for number, text in enumerate(reversed(self._note)):
            self._line(text, MARGIN, self.height - MARGIN / 2 - LINE * number, fontsize=NOTE_SIZE, color=MUTED)
        self._axis_labels()
        self._headings()

    def _axis_labels(self) -> None:
        across, down = self._grid.size
        middle = self._grid.left + across / 2, self._top + down / 2
        self._line(
            self._wording.x, middle[0], self._top + down + self._grid.below + 0.42, ha="center", fontsize=self._size(9)
        )
        self._line(
            self._wording.y,
            MARGIN * (0.45 if self._narrow else 0.8),
            middle[1],
            rotation=90,
            ha="center",
            va="center",
            fontsize=self._size(9),
        )

    def _headings(self) -> None:
        for column, text in enumerate(self._grid.columns):
            middle = self._corner(0, column)[0] + self._grid.panel[0] / 2
            self._line(
                text, middle, self._top - 0.24 - 0.22 * (len(self._grid.rows) > 1), ha="center", fontsize=self._size(9)
            )
        for row, text in enumerate(self._grid.rows if len(self._grid.rows) > 1 else ()):
            left, top = self._corner(row, 0)
            shown = _cut(text, (self.width - left) / (NARROW_SIZE * LETTER)) if self._narrow else text
            self._line(shown, left, top - 0.2, fontsize=self._size(TEXT_SIZE), fontweight="bold", color=MUTED)

    def _size(self, points: float) -> float:
        return min(points, NARROW_SIZE) if self._narrow else points

    def _line(self, text: str, x: float, y: float, **look: Any) -> None:
        """Write a text with its baseline `y` inches below the upper edge."""
        self.figure.text(x / self.width, 1 - y / self.height, text, **look)

    def _legend(self, handles: Sequence[Artist]) -> None:
        if not handles:
            return
        look: dict[str, Any] = {"handles": handles, "frameon": False, "handlelength": 3.2}
        if self._narrow:
            corner, columns = (0.5, MARGIN / 4 / self.height), self._legend_columns(handles)
            look |= {"fontsize": NARROW_SIZE, "handlelength": 2.4, "columnspacing": 1.0, "labelspacing": 0.3}
            self.figure.legend(loc="lower center", bbox_to_anchor=corner, ncols=columns, borderpad=0, **look)
            return
        left = self._grid.left + self._grid.size[0] + 0.1
        corner = left / self.width, 1 - (self._top - 0.05) / self.height
        self.figure.legend(loc="upper left", bbox_to_anchor=corner, **look)


@contextmanager
def styled() -> Iterator[None]:
    """Apply the same style on every machine, whatever its matplotlibrc says."""
    with style.context(["default", STYLE | ({"font.size": NARROW_SIZE} if is_narrow() else {})]):
        yield


@contextmanager
def on_page(width: float | None) -> Iterator[None]:
    """Draw pages of a given width in inches, such as a column of a paper; None for as wide as they need.

    Such pages have 7-point letters and the legend below; `save_caption` writes their title and notes.
    """
    before = _width.set(width)
    try:
        yield
    finally:
        _width.reset(before)


def _wrapped(text: str, inches: float, points: float) -> list[str]:
    return wrap(text, max(20, int(inches / (points * LETTER))), break_long_words=True)


def _cut(text: str, room: float) -> str:
    return text if len(text) <= room else f"{text[: int(room) - 1]}…"
