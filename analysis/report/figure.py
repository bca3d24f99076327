"""A figure of the page: data, words and a Vega-Lite specification made of plain dicts.

Every point carries the identity of its run, so that the page can say what it is. Specifications name no address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import cos, pi, sin
from typing import Any, NamedTuple

from moereplay.analysis.palette import BOUND, DASHES, GRID, INK, LIMIT, MUTED, SOLID, UNKNOWN_MARKERS, Marker, looks
from moereplay.analysis.report.cases import Case, Run

Spec = dict[str, Any]

HEIGHT = 320  #: pixels
FORMATS = {"share": ".0%", "number": ",~g", "whole": "d"}
#: The picked run, which the page sets, has a larger point.
PICKED = "datum.identity === picked"
#: The wheel alone scrolls the page.
ZOOM: Spec = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.ctrlKey]"}, "bind": "scales"}
CONFIG: Spec = {
    "background": "#FFFFFF",
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": GRID,
        "domainColor": MUTED,
        "tickColor": MUTED,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelFlush": False,
    },
    "view": {"stroke": None},
}


class Axis(NamedTuple):
    """A quantity: what it is called, how its numbers are written, and where it begins."""

    title: str
    format: str  #: of `FORMATS`
    zero: bool = False
    log: bool = False
    ticks: Sequence[float] = ()
    suffix: str = ""


class Figure(NamedTuple):
    """What a page needs to show it; `points` have x, y, series and identity, and low and high where known."""

    name: str  #: unique on the page
    title: str
    caption: str
    x: Axis
    y: Axis
    points: Sequence[dict[str, Any]]
    series: Sequence[Series]
    lines: Sequence[dict[str, Any]] = ()  #: x, y and series of lines without points: bounds and curves

    def spec(self) -> Spec:
        """In Vega-Lite."""
        return {
            "width": "container",
            "height": self._height(),
            "autosize": {"type": "fit-x", "contains": "padding"},
            "config": CONFIG,
            "params": [{"name": "picked", "value": ""}],
            "layer": self._layers(),
        }

    @property
    def zooms(self) -> bool:
        """True: both axes are scales that the page moves and stretches."""
        return True

    @property
    def legend(self) -> Sequence[Series]:
        """The lines that the legend names."""
        return self.series

    def _height(self) -> Any:
        return HEIGHT

    def _layers(self) -> list[Spec]:
        """From the back to the front; what zooms is the last."""
        drawn = [self._line(), self._points(), self._targets()] if self.points else []
        layers = [*self._lines(), *self._intervals(), *drawn]
        return [*layers[:-1], layers[-1] | {"params": [ZOOM]}]

    def _lines(self) -> list[Spec]:
        if not self.lines:
            return []
        return [layer(self.lines, {"type": "line", "strokeWidth": 1.5, "clip": True}, self._encoding("dash"))]

    def _intervals(self) -> list[Spec]:
        found = [each for each in self.points if each.get("low") is not None]
        if not found:
            return []
        ends = {"y": channel("low", self.y), "y2": {"field": "high"}}
        bar = {"type": "errorbar", "ticks": {"width": 7}, "rule": {"aria": False}, "thickness": 2, "opacity": 0.8}
        return [{"data": {"values": found}, "mark": bar | {"clip": True}, "encoding": self._encoding() | ends}]

    def _line(self) -> Spec:
        return layer(self.points, {"type": "line", "strokeWidth": 2, "clip": True}, self._encoding("dash"))

    def _points(self) -> Spec:
        mark = {"type": "point", "filled": True, "stroke": INK, "opacity": 1, "clip": True}
        size = {"condition": {"test": PICKED, "value": 150}, "value": 65}
        width = {"condition": {"test": PICKED, "value": 2.5}, "value": 0.7}
        fill = {"fill": self._coloured()}
        encoding = {name: each for name, each in self._encoding("shape").items() if name != "color"}
        return layer(self.points, mark, encoding | fill | {"size": size, "strokeWidth": width})

    def _targets(self) -> Spec:
        """What a finger hits."""
        encoding = {name: each for name, each in self._encoding().items() if name != "color"}
        mark = {"type": "point", "filled": True, "opacity": 0, "size": 500, "cursor": "pointer", "clip": True}
        return layer(self.points, mark, encoding)

    def _encoding(self, *more: str) -> Spec:
        ranges = {"dash": "strokeDash", "shape": "shape"}
        encoding = {"x": channel("x", self.x), "y": channel("y", self.y), "detail": {"field": "series"}}
        encoding["color"] = self._coloured()
        if "dash" in more:
            encoding[ranges["dash"]] = self._dashed()
        if "shape" in more:
            encoding[ranges["shape"]] = self._scaled([each.marker or "circle" for each in self.series])
        return encoding

    def _coloured(self) -> Spec:
        return self._scaled([each.colour for each in self.series])

    def _dashed(self) -> Spec:
        return self._scaled([list(each.dash) or [1, 0] for each in self.series])

    def _scaled(self, values: Sequence[Any]) -> Spec:
        """Each line's own value; the legend is the page's."""
        scale = {"domain": [each.name for each in self.series], "range": list(values)}
        return {"field": "series", "type": "nominal", "scale": scale, "legend": None}


def layer(values: Sequence[dict[str, Any]], mark: Spec, encoding: Spec) -> Spec:
    """Return a layer of a specification with its own data, without labels for screen readers, which have a table."""
    return {"data": {"values": list(values)}, "mark": mark | {"aria": False}, "encoding": encoding}


def channel(field: str, axis: Axis) -> Spec:
    """Return the channel that places `field` along `axis`."""
    label = f"format(datum.value, '{FORMATS[axis.format]}') + '{axis.suffix}'"  # `format` alone would round ticks
    shown: Spec = {"labelExpr": label, "grid": field != "x"}
    if axis.ticks:
        shown["values"] = list(axis.ticks)
    if axis.format == "whole":
        shown["tickMinStep"] = 1
    scale: Spec = {"zero": axis.zero, "nice": field != "x", "padding": 12 if field == "x" else 0}
    if axis.log:
        scale = {"type": "log", "nice": False, "padding": 12}
    return {"field": field, "type": "quantitative", "title": axis.title, "axis": shown, "scale": scale}


# -- Markers as SVG paths in the square from -1 to 1: in figures and in their legends the same, whatever draws them.

UNKNOWN_STARS = [each for each in UNKNOWN_MARKERS if not isinstance(each, str)]

CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z"
PLUS = "M-.35,-1L.35,-1L.35,-.35L1,-.35L1,.35L.35,.35L.35,1L-.35,1L-.35,.35L-1,.35L-1,-.35L-.35,-.35Z"
CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
THIN = "M-1,-.8L-.8,-1L0,-.2L.8,-1L1,-.8L.2,0L1,.8L.8,1L0,.2L-.8,1L-1,.8L-.2,0Z"


def _polygon(corners: int, turned: float = 0.0, inner: float = 1.0) -> str:
    """A regular one with its first corner on top, turned clockwise by quarters; a star where `inner` is less than 1."""
    radii = [1.0] if inner == 1 else [1.0, inner]
    angles = [2 * pi * at / (corners * len(radii)) + turned * pi / 2 for at in range(corners * len(radii))]
    lengths = radii * corners
    places = [(length * sin(angle), -length * cos(angle)) for length, angle in zip(lengths, angles, strict=True)]
    return "M" + "L".join(f"{x:.3f},{y:.3f}" for x, y in places) + "Z"


#: By matplotlib's markers, which `analysis.palette` uses.
PATHS: dict[Marker, str] = {
    **{(corners, 1, degrees): _polygon(corners, -degrees / 90, 0.45) for corners, _, degrees in UNKNOWN_STARS},
    "o": CIRCLE,
    "s": "M-.9,-.9L.9,-.9L.9,.9L-.9,.9Z",
    "^": _polygon(3),
    "v": _polygon(3, 2),
    "<": _polygon(3, 3),
    ">": _polygon(3, 1),
    "D": _polygon(4),
    "d": "M0,-1L.6,0L0,1L-.6,0Z",
    "p": _polygon(5),
    "h": _polygon(6),
    "H": _polygon(6, 1),
    "8": _polygon(8),
    "*": _polygon(5, inner=0.45),
    "P": PLUS,
    "X": CROSS,
    "x": THIN,
}


# -- Lines of figures: each set of policies of a case has one colour, marker and dash in all of its figures.

MOST = 16  #: that a reader can tell from one another in a figure
EVERY_DASH = (SOLID, *DASHES)


class Series(NamedTuple):
    """A line, and what its points are drawn with."""

    name: str
    colour: str
    marker: str  #: an SVG path; empty for none
    dash: Sequence[float]  #: on and off, in pixels; empty for solid


BELADY = Series("Belady's bound (no prefetch)", BOUND, "", (6, 4))
COMPULSORY = Series("compulsory limit", LIMIT, "", (2, 3))


def series(case: Case, runs: Sequence[Run]) -> list[Series]:
    """The lines of a case, at most `MOST`, those of its best runs; a colour and marker per eviction policy, a dash per
    set of the other settings. `runs` are those of the case, best first."""
    names = list(dict.fromkeys(run["series"] for run in runs))[:MOST]
    drawn = {run["series"]: run for run in reversed(runs) if run["series"] in names}
    evictions = looks(str(run["config"]["eviction"]) for run in drawn.values())
    others = list(dict.fromkeys(_others(case, drawn[name]) for name in sorted(names)))
    return [
        _one(name, evictions[str(drawn[name]["config"]["eviction"])], others.index(_others(case, drawn[name])))
        for name in names
    ]


def _one(name: str, look: Any, others: int) -> Series:
    dash = EVERY_DASH[others % len(EVERY_DASH)] if look.dash == SOLID else look.dash
    return Series(name, look.colour, PATHS[look.marker], [round(2 * gap, 1) for gap in dash[1]])


def _others(case: Case, run: Run) -> str:
    """What tells lines of one eviction policy from one another."""
    return str([run["config"].get(name) for name in case.lines if name != "eviction"])


def coinciding(points: Iterable[tuple[str, float, float]]) -> list[list[str]]:
    """The lines that hide one another, from (line, x, y) of every point."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in points:
        lines.setdefault(name, []).append((x, y))
    alike: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, places in lines.items():
        alike.setdefault(tuple(sorted(places)), []).append(name)
    return [names for names in alike.values() if len(names) > 1]
