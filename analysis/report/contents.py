"""Everything that a page shows, as documents: what stands in its JSON, and what its template writes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moereplay.analysis.report import answer, figures
from moereplay.analysis.report.cases import Case, cases, title
from moereplay.analysis.report.cautions import cautions
from moereplay.analysis.report.figure import Figure
from moereplay.analysis.report.health import health
from moereplay.analysis.report.machines import machines
from moereplay.analysis.report.material import Material
from moereplay.analysis.report.method import method
from moereplay.analysis.report.question import question
from moereplay.analysis.report.runs import Run, interval, runs
from moereplay.analysis.verdict import Verdict

CURVES_ALONE = "Curves alone: no configuration was replayed, so none is fastest."


class Panel(NamedTuple):
    """A case as the page shows it."""

    title: str
    answer: Sequence[str]
    budgets: Sequence[answer.Budget]  #: a row per capacity, where several are compared
    runs: Sequence[Run]  #: best first
    figures: Sequence[Figure]
    varies: Sequence[str]  #: settings that have a column in the ranking
    timed: bool  #: whether any run decodes


class Contents(NamedTuple):
    """A page: `data` is its JSON, which holds no less than what is written out."""

    data: dict[str, Any]
    panels: Sequence[Panel]
    traces: Sequence[dict[str, Any]]
    platforms: Sequence[dict[str, Any]]
    method: dict[str, Any]


def contents(material: Material) -> Contents:
    """Of the results. Raises TraceError if the rows of a trace are damaged."""
    found = cases(material)
    every, traces, platforms = runs(found, material), health(material), machines(material)
    panels = [_panel(at, case, found, every, material) for at, case in enumerate(found)] or [_curves(material)]
    best = answer.brief(found)
    data = {
        "question": question(material, found),
        "answer": [sentence for panel in panels for sentence in _named(panel, len(panels) > 1)],
        "budgets": [each._asdict() | {"case": at} for at, case in enumerate(found) for each in answer.budgets(case)],
        "best": best and _best(best, every),
        "interval": best and interval(best.best, best.figure.name),
        "runs": every,
        "warnings": cautions(material, found, traces, platforms),
    }
    return Contents(data, panels, traces, platforms, method(material))


def _panel(at: int, case: Case, found: Sequence[Case], every: Sequence[Run], material: Material) -> Panel:
    own = [run for run in every if run["case"] == at]
    return Panel(
        title=title(case, found),
        answer=answer.sentences(case),
        budgets=answer.budgets(case),
        runs=own,
        figures=figures.figures(at, case, own, material),
        varies=case.names,
        timed=any(run["figures"]["tokens_per_s"] is not None for run in own),
    )


def _curves(material: Material) -> Panel:
    return Panel("", [CURVES_ALONE], [], [], figures.of_curves(material), (), False)


def _named(panel: Panel, several: bool) -> list[str]:
    """The sentences of a case, which say of which one they are where there are several."""
    return [f"{panel.title}: {sentence}" if several else sentence for sentence in panel.answer]


def _best(found: Verdict, every: Sequence[Run]) -> dict[str, Any]:
    """The best of all, and the others that may be as good."""
    run = next(run for run in every if run["identity"] == found.best.settings["identity"])
    alike = {entry.settings["identity"] for entry in (*found.tied[1:], *found.as_good)}
    return {
        "identity": run["identity"],
        "label": run["label"],
        "figure": found.figure.name,
        "value": found.value,
        "case": run["case"],
        "as_good": sorted(alike),
    }
