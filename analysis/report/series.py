"""Lines of figures: each set of policies of a case has one colour, marker and dash in all of its figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from moereplay.analysis.palette import BOUND, DASHES, LIMIT, SOLID, looks
from moereplay.analysis.report.cases import Case
from moereplay.analysis.report.markers import PATHS
from moereplay.analysis.report.runs import Run

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
