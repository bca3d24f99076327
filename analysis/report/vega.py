"""Charts of the page in Vega-Lite, and Vega itself: the runtime, compiled specifications, and still pictures.

Every point carries the identity of its run, so that the page can show its configuration. Specifications name no
address. vl-convert, of the extra `report`, contains Vega and Vega-Lite, so nothing is fetched.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import cos, pi, sin
from typing import Any

from moereplay.analysis.figures.chart import Axis, Chart, Panel, Series
from moereplay.analysis.palette import GRID, INK, MUTED, UNKNOWN_MARKERS, Marker
from moereplay.traces.documents import json_text

Spec = dict[str, Any]

HEIGHT = 320  #: pixels
ROW = 24  #: pixels from bar to bar
LONGEST_NAME = 230  #: pixels of a bar's name
MOST_TICKS = 8  #: capacities that are all labelled
STILL_WIDTH = 720  #: pixels
RUNTIME = "window.vegaEmbed = vegaEmbed;"
FORMATS = {"share": ".0%", "number": ",~g", "whole": "d"}
LABELS = {"share": ".1%", "number": ",.4~g", "whole": "d"}  #: of bars
HALO: Spec = {"stroke": "#FFFFFF", "strokeWidth": 4}  #: keeps a bound from crossing a number
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


@dataclass(frozen=True)
class Figure:
    """A chart of one panel on a page."""

    name: str  #: unique on the page
    chart: Chart
    as_bars: bool = (
        False  #: for a single capacity: a bar per set of policies, the best on top; bounds are upright lines
    )

    @property
    def panel(self) -> Panel:
        """The only panel."""
        return self.chart.panels[0][0]

    @property
    def points(self) -> list[Spec]:
        """Points of measured series as documents."""
        return self._documents(measured=True)

    @property
    def lines(self) -> list[Spec]:
        """Points of bounds and curves as documents."""
        return self._documents(measured=False)

    def _documents(self, measured: bool) -> list[Spec]:
        series = [line for line in self.panel.series if line.measured is measured]
        return [_document(line, point) for line in series for point in line.points if point.y is not None]

    @property
    def legend(self) -> list[Spec]:
        """Name, colour, dash and marker path of the lines; bars are named at the axis."""
        shown = [line for line in self.panel.series if not (self.as_bars and line.measured)]
        return [
            {"name": each.name, "colour": each.look.colour, "dash": _dash(each), "marker": _path(each)}
            for each in shown
        ]

    @property
    def zooms(self) -> bool:
        """True if both axes are scales that the page can move and stretch."""
        return not self.as_bars

    def spec(self) -> Spec:
        """Return the specification in Vega-Lite."""
        return {
            "width": "container",
            "height": {"step": ROW} if self.as_bars else HEIGHT,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "config": CONFIG,
            "params": [{"name": "picked", "value": ""}],
            "layer": _bar_layers(self) if self.as_bars else _line_layers(self),
        }


def _document(series: Series, point: Any) -> Spec:
    found = {"x": point.x, "y": point.y, "series": series.name, "identity": point.identity}
    return found if point.low is None else found | {"low": point.low, "high": point.high}


def _dash(series: Series) -> list[float]:
    return [round(2 * gap, 1) for gap in series.look.dash[1]]


def _path(series: Series) -> str:
    return PATHS[series.look.marker] if series.look.marker else ""


def _line_layers(figure: Figure) -> list[Spec]:
    """Return the layers from the back to the front; the last one zooms."""
    points, lines = figure.points, figure.lines
    layers = [_layer(lines, _line(1.5), _encoding(figure, "strokeDash"))] if lines else []
    ended = [point for point in points if "low" in point]
    if ended:
        bar = {"type": "errorbar", "ticks": {"width": 7}, "rule": {"aria": False}, "thickness": 2, "opacity": 0.8}
        ends = {"y": _channel("low", figure.chart.y), "y2": {"field": "high"}}
        encoding = _encoding(figure) | ends
        layers.append({"data": {"values": ended}, "mark": bar | {"clip": True}, "encoding": encoding})
    if points:
        layers += [_layer(points, _line(2), _encoding(figure, "strokeDash")), _dots(figure), _targets(figure)]
    return [*layers[:-1], layers[-1] | {"params": [ZOOM]}]


def _line(width: float) -> Spec:
    return {"type": "line", "strokeWidth": width, "clip": True}


def _dots(figure: Figure) -> Spec:
    mark = {"type": "point", "filled": True, "stroke": INK, "opacity": 1, "clip": True}
    size = {"condition": {"test": PICKED, "value": 150}, "value": 65}
    width = {"condition": {"test": PICKED, "value": 2.5}, "value": 0.7}
    encoding = _encoding(figure, "shape")
    encoding["fill"] = encoding.pop("color")
    return _layer(figure.points, mark, encoding | {"size": size, "strokeWidth": width})


def _targets(figure: Figure) -> Spec:
    """Return invisible points that are large enough for a finger."""
    encoding = _encoding(figure)
    encoding.pop("color")
    mark = {"type": "point", "filled": True, "opacity": 0, "size": 500, "cursor": "pointer", "clip": True}
    return _layer(figure.points, mark, encoding)


def _encoding(figure: Figure, *more: str) -> Spec:
    chart = figure.chart
    places = {"x": _channel("x", chart.x), "y": _channel("y", chart.y), "detail": {"field": "series"}}
    return places | {name: _scaled(figure, name) for name in ("color", *more)}


def _scaled(figure: Figure, name: str) -> Spec:
    """Return a channel on which each series has its own value; the legend is the page's."""
    series = figure.panel.series
    values = {
        "color": [line.look.colour for line in series],
        "strokeDash": [_dash(line) or [1, 0] for line in series],
        "shape": [_path(line) or "circle" for line in series],
    }[name]
    scale = {"domain": [line.name for line in series], "range": values}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": None}


def _bar_layers(figure: Figure) -> list[Spec]:
    """Return the layers from the back to the front."""
    points, lines, along = figure.points, figure.lines, figure.chart.y
    names = [line.name for line in figure.panel.series if line.measured]
    axis = {"title": None, "labelLimit": LONGEST_NAME, "grid": False, "ticks": False}
    rows = {"field": "series", "type": "nominal", "sort": names, "scale": {"domain": names}, "axis": axis}
    placed = {"x": _channel("y", along) | {"stack": None}, "y": rows}
    width = {"condition": {"test": PICKED, "value": 2.5}, "value": 0}
    bar = {"type": "bar", "stroke": INK, "cursor": "pointer", "height": {"band": 0.68}}
    layers = [_layer(points, bar, placed | {"color": _scaled(figure, "color"), "strokeWidth": width})]
    if lines:
        encoding = {"x": _channel("y", along)} | {name: _scaled(figure, name) for name in ("color", "strokeDash")}
        layers.append(_layer(lines, {"type": "rule", "strokeWidth": 1.5}, encoding))
    ended = [point for point in points if "low" in point]
    if ended:
        mark = {"type": "errorbar", "ticks": {"height": 7}, "rule": {"aria": False}, "thickness": 1.5, "color": INK}
        layers.append(_layer(ended, mark, placed | {"x": _channel("low", along), "x2": {"field": "high"}}))
    ends = [point | {"end": point.get("high", point["y"])} for point in points]
    text = {"field": "y", "type": "quantitative", "format": LABELS[along.format]}
    mark = {"type": "text", "align": "left", "dx": 6, "fontSize": 12, "fill": INK}
    encoding = placed | {"x": _channel("end", along), "text": text}
    return [*layers, *(_layer(ends, mark | edge, encoding) for edge in (HALO, {}))]


def _layer(values: Sequence[Spec], mark: Spec, encoding: Spec) -> Spec:
    """Return a layer with its own data, without labels for screen readers, which have a table."""
    return {"data": {"values": list(values)}, "mark": mark | {"aria": False}, "encoding": encoding}


def _channel(field: str, axis: Axis) -> Spec:
    label = f"format(datum.value, '{FORMATS[axis.format]}') + '{axis.suffix}'"  # `format` alone would round ticks
    shown: Spec = {"labelExpr": label, "grid": field != "x"}
    if 0 < len(axis.ticks) <= MOST_TICKS:
        shown["values"] = [tick.at for tick in axis.ticks]
    if axis.format == "whole":
        shown["tickMinStep"] = 1
    scale: Spec = {"zero": axis.zero, "nice": field != "x", "padding": 12 if field == "x" else 0}
    if axis.scale == "log":
        scale = {"type": "log", "nice": False, "padding": 12}
    return {"field": field, "type": "quantitative", "title": axis.named, "axis": shown, "scale": scale}


# Markers

UNKNOWN_STARS = [marker for marker in UNKNOWN_MARKERS if not isinstance(marker, str)]

CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z"
PLUS = "M-.35,-1L.35,-1L.35,-.35L1,-.35L1,.35L.35,.35L.35,1L-.35,1L-.35,.35L-1,.35L-1,-.35L-.35,-.35Z"
CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
THIN = "M-1,-.8L-.8,-1L0,-.2L.8,-1L1,-.8L.2,0L1,.8L.8,1L0,.2L-.8,1L-1,.8L-.2,0Z"


def _polygon(corners: int, turned: float = 0.0, inner: float = 1.0) -> str:
    """Return a regular polygon with a corner on top, turned clockwise by quarters; a star if `inner` is below 1."""
    radii = [1.0] if inner == 1 else [1.0, inner]
    angles = [2 * pi * at / (corners * len(radii)) + turned * pi / 2 for at in range(corners * len(radii))]
    lengths = radii * corners
    places = [(length * sin(angle), -length * cos(angle)) for length, angle in zip(lengths, angles, strict=True)]
    return "M" + "L".join(f"{x:.3f},{y:.3f}" for x, y in places) + "Z"


#: Markers as SVG paths in the square from -1 to 1, by matplotlib's letters in `analysis.palette`.
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


# Vega


@cache
def runtime() -> str:
    """Return Vega as a script for a page, after its licences; it cannot end the element that holds it."""
    import vl_convert

    notice = files("moereplay.analysis.report").joinpath("vega_licences.txt").read_text("utf-8")
    return f"/*\n{notice}*/\n{script_safe(vl_convert.javascript_bundle(RUNTIME))}"


def script_safe(text: str) -> str:
    """Escape JavaScript so that no string ends the script element or begins an HTML comment."""
    return re.sub("</(?=script)", r"<\\/", text, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def compiled(spec: Spec) -> dict[str, Any]:
    """Compile a specification for Vega, without the address of its schema."""
    import vl_convert

    made = vl_convert.vegalite_to_vega(spec)
    return {name: value for name, value in made.items() if name != "$schema"}


def still(spec: Spec) -> str:
    """Render a picture as a data URL."""
    import vl_convert

    svg = _renumbered(vl_convert.vegalite_to_svg(json_text(spec | {"width": STILL_WIDTH})))
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _renumbered(svg: str) -> str:
    """Number clips from 0 in every picture; Vega counts them per process, which would change the bytes."""
    numbers = {name: at for at, name in enumerate(dict.fromkeys(re.findall(r"\bclip\d+\b", svg)))}
    return re.sub(r"\bclip\d+\b", lambda found: f"clip{numbers[found[0]]}", svg)
