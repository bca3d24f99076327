"""What a figure of a paper is: its source, the configurations that it replays, and how their numbers are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moereplay.policies.contract import PolicyError
from moereplay.results.chart import Chart
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import plan
from moereplay.traces.schema import Trace

#: What a trace can have beside the capabilities that policies need.
PROMPTS, DECODE = "prompts", "decode"
#: How to get what a trace lacks.
REMEDY = {
    PROMPTS: "replay a trace of requests that have prompts",
    DECODE: "replay a trace that has decoded tokens",
    "lookahead": "record with --look-ahead 1",
    "logits": "record the model; a trace of ids alone has none",
    "weights": "import or record gate weights",
}
#: Stands for next-gate prediction where a trace has no look-ahead; recall as measured on the bundled miniature.
ORACLE = "oracle:recall=0.87:precision=0.87"


class Cell(NamedTuple):
    """One configuration, and where it stands in a figure."""

    config: ReplayConfig
    series: str  #: the line, or the colour of the bar
    x: float | str  #: a number on the axis, or the name under the bar
    panel: str = ""


class Published(NamedTuple):
    """A number, or a range over models, that the paper prints."""

    value: str  #: the column of the figure that it is to be compared with
    low: float
    high: float
    series: str
    x: float | str
    source: str  #: section, figure or table
    panel: str = ""
    model: str = ""  #: as `moereplay models` calls it; empty: of several, or not said


@dataclass(frozen=True)
class PaperFigure:
    """A plug-in: everything that `moereplay paper` knows of one figure or table."""

    name: str
    where: str  #: in the paper
    title: str
    chart: Chart
    cells: Callable[[Trace], Iterable[Cell]]
    needs: frozenset[str] = frozenset()  #: without which there is nothing to show
    assumed: str = ""  #: what the paper leaves open, or is not known of it, and what was taken
    throughout: str = ""  #: the same of all figures that share their settings
    published: tuple[Published, ...] = ()

    @property
    def heading(self) -> str:
        """The title of its page, with the paper's number where it is known."""
        return f"{self.title} ({self.where})" if self.where.startswith(("Fig.", "Table", "§")) else self.title

    @property
    def note(self) -> str:
        """What its numbers rest on."""
        return f"{self.assumed} {self.throughout}".strip()


class Planned(NamedTuple):
    """The cells of a figure that a trace allows, and what is said of the others."""

    figure: PaperFigure
    cells: list[Cell]
    left_out: dict[str, str]  #: reason by series


class LackingError(Exception):
    """A trace does not have what a figure needs; the message says what, and how to get it."""


def planned(figure: PaperFigure, trace: Trace) -> Planned:
    """The cells that can be replayed. Raises LackingError if the figure cannot, ConfigError for a wrong grid."""
    for need in sorted(figure.needs - facts(trace)):
        raise LackingError(f"needs {need}, which this trace lacks; {REMEDY[need]}")
    able, left_out = list[Cell](), dict[str, str]()
    for cell in figure.cells(trace):
        try:
            plan(trace, cell.config)
        except PolicyError as refused:
            left_out[cell.series] = str(refused)
        else:
            able.append(cell)
    if not able:
        raise LackingError(next(iter(left_out.values())))
    return Planned(figure, able, left_out)


def facts(trace: Trace) -> frozenset[str]:
    """What a trace holds that figures may need."""
    prompted = int(trace.prompt_lengths.sum())
    has = {PROMPTS: prompted > 0, DECODE: prompted < trace.tokens}
    return trace.capabilities | {name for name, held in has.items() if held}


def predictor(trace: Trace) -> str:
    """Next-gate prefetch, or an oracle of its recall where the trace has no look-ahead."""
    return "top_k" if "lookahead" in trace.capabilities else ORACLE


def grid(
    base: dict[str, str], changes: Sequence[tuple[str, float | str, dict[str, str]]], panels: dict[str, dict[str, str]]
) -> Iterator[Cell]:
    """A cell per panel and (series, x, settings over the base)."""
    for panel, own in panels.items():
        for series, x, settings in changes:
            yield Cell(configure(**base | own | settings), series, x, panel)


def of_model(published: Sequence[Published], model: str) -> list[Published]:
    """The numbers of this model if there are any, else the range over all models of each."""
    own = [each for each in published if each.model and each.model in model.lower()]
    chosen = own or published
    spots: dict[tuple[str, str, str, float | str], list[Published]] = {}
    for each in chosen:
        spots.setdefault((each.value, each.panel, each.series, each.x), []).append(each)
    return [_range(found) for found in spots.values()]


def _range(found: Sequence[Published]) -> Published:
    low, high = min(each.low for each in found), max(each.high for each in found)
    models = {each.model for each in found}
    return found[0]._replace(low=low, high=high, model=models.pop() if len(models) == 1 else f"{len(models)} models")
