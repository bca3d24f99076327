"""A figure of the page: data, words and a Vega-Lite specification made of plain dicts.

Every point carries the identity of its run, so that the page can say what it is. Specifications name no address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moereplay.analysis.palette import GRID, INK, MUTED
from moereplay.analysis.report.series import Series

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
            "height": HEIGHT,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "config": CONFIG,
            "params": [{"name": "picked", "value": ""}],
            "layer": self._layers(),
        }

    def _layers(self) -> list[Spec]:
        """From the back to the front; what zooms is the last."""
        drawn = [self._line(), self._points(), self._targets()] if self.points else []
        layers = [*self._lines(), *self._intervals(), *drawn]
        return [*layers[:-1], layers[-1] | {"params": [ZOOM]}]

    def _lines(self) -> list[Spec]:
        if not self.lines:
            return []
        return [_layer(self.lines, {"type": "line", "strokeWidth": 1.5, "clip": True}, self._encoding("dash"))]

    def _intervals(self) -> list[Spec]:
        found = [each for each in self.points if each.get("low") is not None]
        if not found:
            return []
        ends = {"y": _channel("low", self.y), "y2": {"field": "high"}}
        bar = {"type": "errorbar", "ticks": {"width": 7}, "rule": {"aria": False}, "thickness": 2, "opacity": 0.8}
        return [{"data": {"values": found}, "mark": bar | {"clip": True}, "encoding": self._encoding() | ends}]

    def _line(self) -> Spec:
        return _layer(self.points, {"type": "line", "strokeWidth": 2, "clip": True}, self._encoding("dash"))

    def _points(self) -> Spec:
        mark = {"type": "point", "filled": True, "stroke": INK, "opacity": 1, "clip": True}
        size = {"condition": {"test": PICKED, "value": 150}, "value": 65}
        width = {"condition": {"test": PICKED, "value": 2.5}, "value": 0.7}
        fill = {"fill": self._scaled([each.colour for each in self.series])}
        encoding = {name: each for name, each in self._encoding("shape").items() if name != "color"}
        return _layer(self.points, mark, encoding | fill | {"size": size, "strokeWidth": width})

    def _targets(self) -> Spec:
        """What a finger hits."""
        encoding = {name: each for name, each in self._encoding().items() if name != "color"}
        mark = {"type": "point", "filled": True, "opacity": 0, "size": 500, "cursor": "pointer", "clip": True}
        return _layer(self.points, mark, encoding)

    def _encoding(self, *more: str) -> Spec:
        ranges = {"dash": "strokeDash", "shape": "shape"}
        encoding = {"x": _channel("x", self.x), "y": _channel("y", self.y), "detail": {"field": "series"}}
        encoding["color"] = self._scaled([each.colour for each in self.series])
        if "dash" in more:
            encoding[ranges["dash"]] = self._scaled([list(each.dash) or [1, 0] for each in self.series])
        if "shape" in more:
            encoding[ranges["shape"]] = self._scaled([each.marker or "circle" for each in self.series])
        return encoding

    def _scaled(self, values: Sequence[Any]) -> Spec:
        """Each line's own value; the legend is the page's."""
        scale = {"domain": [each.name for each in self.series], "range": list(values)}
        return {"field": "series", "type": "nominal", "scale": scale, "legend": None}


def _layer(values: Sequence[dict[str, Any]], mark: Spec, encoding: Spec) -> Spec:
    return {"data": {"values": list(values)}, "mark": mark | {"aria": False}, "encoding": encoding}


def _channel(field: str, axis: Axis) -> Spec:
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
