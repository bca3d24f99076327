"""Read a paper's figures from its TOML file, plan their cells on a trace, and replay cells without stored results.

A file has the paper's settings, then a table per figure. `cells` make the configurations: for every combination of the
values of `over`, a series, a place on the axis (`x`; the series where none is given) and settings (`set`) over those of
the preset. Texts are templates: `{lam:g}` is a value of `over`, `{predictor}` is next-gate prefetch or the oracle that
stands for it. `over` takes a list, the name of one of the file's `lists`, or values that depend on the model (`along`).
A cell with a preset of its own has none of the paper's settings. `grids` are cells that several figures name.
`published` has the numbers that the paper prints: `points` are [x, value] or [x, least, greatest], `quotients` are
[x, before, after]; "last layer" is an x as well.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.policies.contract import PolicyError
from moereplay.results.chart import Chart
from moereplay.results.errors import unknown
from moereplay.results.parts import stored
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.presets import preset
from moereplay.simulator.replay import ENGINES, plan
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.parts import keep
from moereplay.sweeps.policy_sets import Along, combined
from moereplay.sweeps.store import Folder
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Frozen, Geometry, Trace

#: Names on the command line, in the order in which papers are listed.
PAPERS = ("specmd", "cache-conditional")
#: What a figure can need of a trace besides the capabilities that policies need: tokens of each phase, in their order.
PROMPTS, DECODE = "prompts", "decode"
#: How to get what a trace lacks.
REMEDY = {
    PROMPTS: "replay a trace of requests that have prompts",
    DECODE: "replay a trace that has decoded tokens, or pass --passes decode:N",
    "lookahead": "record with --look-ahead 1",
    "logits": "record the model; a trace of ids alone has none",
    "weights": "import or record gate weights",
}
#: Stands for next-gate prediction where a trace has no look-ahead; recall as measured on the bundled miniature.
ORACLE = "oracle:recall=0.87:precision=0.87"
LAST_LAYER = "last layer"  #: place of a published number in a figure by layer

Number = int | float
Point = Number | str  #: a number on the axis, or the name under a bar


class Cell(NamedTuple):
    """One configuration, and its place in a figure."""

    config: ReplayConfig
    series: str  #: the line, or the colour of the bar
    x: Point
    panel: str = ""


class Published(NamedTuple):
    """A number, or a range over models, that the paper prints."""

    value: str  #: the column of the figure to compare it with
    low: float
    high: float
    series: str
    x: Point
    source: str  #: section, figure or table
    panel: str = ""
    model: str = ""  #: as `moereplay models` spells it; empty for several models, or if the paper does not say


class Cells(Frozen):
    """Templates of cells: one cell for each combination of `over` in each panel."""

    series: str
    x: Point = ""
    over: dict[str, Along] = {}
    set: dict[str, str] = {}
    preset: str = ""


class Numbers(Frozen):
    """Published numbers of one series, or, without a series, of a series per point."""

    points: list[tuple[Point, Number] | tuple[Point, Number, Number]] = []
    quotients: list[tuple[Point, float, float]] = []
    value: str = ""
    series: str = ""
    panel: str = ""
    source: str = ""
    model: str = ""


class Entry(Frozen):
    """A figure as its file spells it."""

    name: str
    where: str
    title: str
    chart: dict[str, Any]
    cells: list[Cells] | str  #: or the name of one of the paper's `grids`
    set: dict[str, str] = {}
    needs: frozenset[str] = frozenset()
    assumed: str = ""
    over: dict[str, Along] = {}
    panels: bool = True
    source: str = ""
    published: list[Numbers] = []


class Paper(Frozen):
    """A file of figures, and the settings that they share."""

    preset: str
    assumed: str
    set: dict[str, str] = {}
    panels: dict[str, dict[str, str]]
    lists: dict[str, list[Point]] = {}
    grids: dict[str, list[Cells]] = {}
    figures: list[Entry]


class PaperFigure(NamedTuple):
    """A figure or table of a paper."""

    paper: Paper
    entry: Entry

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.entry.name

    @property
    def where(self) -> str:
        """Figure, table or section of the paper."""
        return self.entry.where

    @property
    def title(self) -> str:
        """The title without the place in the paper."""
        return self.entry.title

    @property
    def chart(self) -> Chart:
        """Chart that draws the numbers."""
        return Chart(**self.entry.chart)

    @property
    def needs(self) -> frozenset[str]:
        """Requirements of the figure on a trace."""
        return self.entry.needs

    @property
    def assumed(self) -> str:
        """Details that the paper leaves open in this figure, and the choices made here."""
        return self.entry.assumed

    @property
    def throughout(self) -> str:
        """The assumptions of all figures that share the paper's settings."""
        return "" if any(template.preset for template in self.templates) else self.paper.assumed

    @property
    def templates(self) -> list[Cells]:
        """The templates of its cells, of its own or of a grid of the paper."""
        cells = self.entry.cells
        return self.paper.grids[cells] if isinstance(cells, str) else cells

    @property
    def heading(self) -> str:
        """The title of its page, with the paper's number if known."""
        return f"{self.title} ({self.where})" if self.where.startswith(("Fig.", "Table", "§")) else self.title

    @property
    def note(self) -> str:
        """Assumptions behind the numbers."""
        return f"{self.assumed} {self.throughout}".strip()

    @property
    def published(self) -> list[Published]:
        """The paper's numbers."""
        return [each for numbers in self.entry.published for each in self._published(numbers)]

    def _published(self, numbers: Numbers) -> Iterator[Published]:
        column = numbers.value or next(iter(self.chart.drawn))
        place = {"source": numbers.source or self.entry.source or self.where, "panel": numbers.panel}
        for x, low, *high in numbers.points:
            ends = low, high[0] if high else low
            yield Published(column, *ends, numbers.series or str(x), x, **place, model=numbers.model)
        for x, before, after in numbers.quotients:
            quotient = after / before
            yield Published(column, quotient, quotient, numbers.series, x, **place, model=numbers.model)

    def cells(self, trace: Trace, given: Mapping[str, str] | None = None) -> Iterator[Cell]:
        """Yield a cell per panel, template and combination of values; the settings `given` hold in every cell.

        Raises ConfigError for a wrong grid.
        """
        panels = self.paper.panels if self.entry.panels else {"": {}}
        for panel, own in panels.items():
            for template in self.templates:
                base = preset(template.preset or self.paper.preset).values()
                shared = ({} if template.preset else self.paper.set) | self.entry.set
                for values in self._combinations(template, trace.geometry):
                    values["predictor"] = predictor(trace)
                    settings = {name: text.format(**values) for name, text in (shared | own | template.set).items()}
                    series = template.series.format(**values)
                    yield Cell(
                        configure(**base | settings | dict(given or {})),
                        series,
                        _place(template.x, values, series),
                        panel,
                    )

    def _combinations(self, template: Cells, geometry: Geometry) -> Iterator[dict[str, Any]]:
        axes = (self.entry.over | template.over).items()
        return combined({name: self.paper.lists.get(str(axis), axis) for name, axis in axes}, geometry)


class Planned(NamedTuple):
    """The cells of a figure that a trace allows, and the reason of each series that it does not."""

    figure: PaperFigure
    cells: list[Cell]
    left_out: dict[str, str]


class LackingError(Exception):
    """A trace lacks data that a figure needs; the message names it and how to get it."""


class Work(NamedTuple):
    """Configurations of a trace: those to replay, and the number already stored."""

    left: list[ReplayConfig]
    stored: int


def figures_of(paper: str, names: str = "") -> list[PaperFigure]:
    """Return a paper's figures, all or those of a comma list. Raises ResultError, suggesting the nearest name."""
    if paper not in PAPERS:
        raise unknown("paper", paper, PAPERS)
    found = _read(paper)
    figures = {figure.name: PaperFigure(found, figure) for figure in found.figures}
    wanted = [name.strip() for name in names.split(",")] if names else list(figures)
    for name in wanted:
        if name not in figures:
            raise unknown(f"figure of {paper}", name, list(figures))
    return [figures[name] for name in dict.fromkeys(wanted)]


def planned(figure: PaperFigure, trace: Trace, given: Mapping[str, str] | None = None) -> Planned:
    """Return the cells that can be replayed, with the settings `given`.

    Raises LackingError if none can, ConfigError for a wrong grid.
    """
    for need in sorted(figure.needs - facts(trace, (given or {}).get("passes", "recorded"))):
        raise LackingError(f"requires {need}, which this trace lacks; {REMEDY[need]}")
    able, refused = list[Cell](), dict[str, str]()
    for cell in figure.cells(trace, given):
        try:
            plan(trace, cell.config)
        except PolicyError as error:
            refused[cell.series] = str(error)
        else:
            able.append(cell)
    if not able:
        raise LackingError(next(iter(refused.values())))
    drawn = {cell.series for cell in able}
    return Planned(figure, able, {f"a part of {name}" if name in drawn else name: why for name, why in refused.items()})


def facts(trace: Trace, passes: str) -> frozenset[str]:
    """Return the facts of a trace under this schedule that figures may require."""
    plan = schedule(trace, passes)
    phases = np.unique(plan.phase if plan.rows is None else plan.rows.phase)
    return trace.capabilities | {(PROMPTS, DECODE)[phase] for phase in phases}


def predictor(trace: Trace) -> str:
    """Return next-gate prefetch, or an oracle of its recall where the trace has no look-ahead."""
    return "top_k" if "lookahead" in trace.capabilities else ORACLE


def of_model(published: Sequence[Published], model: str) -> list[Published]:
    """Return the numbers of this model if there are any, else the range of each over all models."""
    own = [each for each in published if each.model and each.model in model.lower()]
    spots: dict[tuple[str, str, str, Point], list[Published]] = {}
    for each in own or published:
        spots.setdefault((each.value, each.panel, each.series, each.x), []).append(each)
    return [_range(found) for found in spots.values()]


def work(folder: Path, trace: Trace, configs: Iterable[ReplayConfig]) -> Work:
    """Return the configurations without a result in the folder, each once. Raises PartError for a broken part."""
    done = stored(Folder(folder).provenances(), "requests")
    by_identity = {config.identity(trace): config for config in configs}
    left = [config for identity, config in by_identity.items() if ("configuration", identity) not in done]
    return Work(left, len(by_identity) - len(left))


def replay_into(
    folder: Path,
    trace: Trace,
    configs: Sequence[ReplayConfig],
    workers: int = 1,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Replay configurations, each stored with its bound when it ends. Raises ConfigError or TraceError."""
    for _ in keep(folder, trace, configs, run_grid(trace, configs, workers, done=done, by_layer=None), ENGINES[0]):
        pass


@cache
def _read(paper: str) -> Paper:
    text = files("moereplay.sweeps.papers").joinpath(f"{paper}.toml").read_text("utf-8")
    return Paper.model_validate(tomllib.loads(text))


def _place(template: Point, values: Mapping[str, Any], series: str) -> Point:
    """Return the place on the axis: a value of `over` keeps its type."""
    if not isinstance(template, str):
        return template
    name = template.removeprefix("{").removesuffix("}")
    return values.get(name, template or series)


def _range(found: Sequence[Published]) -> Published:
    low, high = min(each.low for each in found), max(each.high for each in found)
    models = {each.model for each in found}
    return found[0]._replace(low=low, high=high, model=models.pop() if len(models) == 1 else f"{len(models)} models")
