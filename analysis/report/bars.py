"""A figure of one capacity: a horizontal bar for each set of policies, the best on top; bounds are vertical lines."""

from __future__ import annotations

from moereplay.analysis.palette import INK
from moereplay.analysis.report.figure import PICKED, Figure, Series, Spec, channel, layer

ROW = 24  #: pixels from bar to bar
LONGEST_NAME = 230  #: pixels; names that are longer end in dots
HALO: Spec = {"stroke": "#FFFFFF", "strokeWidth": 4}  #: so that a bound does not cross a number
LABELS = {"share": ".1%", "number": ",.4~g", "whole": "d"}


class Bars(Figure):
    """The same fields as a figure of points; `x` is the one capacity and `y` the length of a bar."""

    @property
    def zooms(self) -> bool:
        """False: names have no scale to move along."""
        return False

    @property
    def legend(self) -> list[Series]:
        """The bounds: bars have their names at the axis."""
        bars = {point["series"] for point in self.points}
        return [each for each in self.series if each.name not in bars]

    def _layers(self) -> list[Spec]:
        """From the back to the front."""
        return [self._bars(), *self._bounds(), *self._ends(), self._labels(HALO), self._labels({})]

    def _height(self) -> Spec:
        return {"step": ROW}

    def _bars(self) -> Spec:
        width = {"condition": {"test": PICKED, "value": 2.5}, "value": 0}
        mark = {"type": "bar", "stroke": INK, "cursor": "pointer", "height": {"band": 0.68}}
        return layer(self.points, mark, self._placed() | {"color": self._coloured(), "strokeWidth": width})

    def _bounds(self) -> list[Spec]:
        if not self.lines:
            return []
        encoding = {"x": channel("y", self.y), "color": self._coloured(), "strokeDash": self._dashed()}
        return [layer(self.lines, {"type": "rule", "strokeWidth": 1.5}, encoding)]

    def _ends(self) -> list[Spec]:
        found = [each for each in self.points if each.get("low") is not None]
        if not found:
            return []
        ends = {"x": channel("low", self.y), "x2": {"field": "high"}}
        bar = {"type": "errorbar", "ticks": {"height": 7}, "rule": {"aria": False}, "thickness": 1.5, "color": INK}
        return [layer(found, bar, self._placed() | ends)]

    def _labels(self, edge: Spec) -> Spec:
        """The value of each bar, after its end and that of its interval."""
        ended = [point | {"end": point.get("high", point["y"])} for point in self.points]
        text = {"field": "y", "type": "quantitative", "format": LABELS[self.y.format]}
        mark = {"type": "text", "align": "left", "dx": 6, "fontSize": 12, "fill": INK}
        return layer(ended, mark | edge, self._placed() | {"x": channel("end", self.y), "text": text})

    def _placed(self) -> Spec:
        """A row for each set of policies, in the order of the series."""
        bars = {point["series"] for point in self.points}
        names = [each.name for each in self.series if each.name in bars]
        axis = {"title": None, "labelLimit": LONGEST_NAME, "grid": False, "ticks": False}
        rows = {"field": "series", "type": "nominal", "sort": names, "scale": {"domain": names}, "axis": axis}
        return {"x": channel("y", self.y) | {"stack": None}, "y": rows}
