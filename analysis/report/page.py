"""The HTML page: contents in the template, with styles, scripts and data inside.

Its content security policy loads nothing and runs only the two scripts whose hashes it names. Texts from files are
escaped by the template, or put into JSON without any `<`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from moereplay.analysis.report import answer, figures
from moereplay.analysis.report.answer import meaning, question
from moereplay.analysis.report.cases import Case, Material, Run, cases, interval, runs, title
from moereplay.analysis.report.cautions import cautions, health, machines, method
from moereplay.analysis.report.figures import summary, value
from moereplay.analysis.report.vega import Figure, compiled, runtime, still
from moereplay.analysis.tables import SHARES, Share, cell
from moereplay.analysis.verdict import Verdict
from moereplay.traces.documents import json_text
from moereplay.traces.texts import escaped_document, escaped_lines

if TYPE_CHECKING:
    from jinja2 import Template


FIRST = 30  #: rows of a ranking before "show all"
#: Columns of the ranking, with their heads and meanings.
COLUMNS = {
    "tokens_per_s": ("tokens/s", "of a request, decoded tokens"),
    "hit_rate": ("hit rate", "hits per access"),
    "belady_hit_rate": ("Belady", "upper bound on hits for any eviction without prefetch"),
    "ttft_mean_ms": ("TTFT, ms", "time to first token, mean"),
    "tpot_ms": ("TPOT, ms", "time per output token"),
    "collisions_per_miss": ("collisions per miss", "misses on experts evicted earlier in the same pass"),
    "gb_moved": ("GB moved", "by demand and prefetch"),
}
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}; base-uri 'none'; form-action 'none'"
)


def page(material: Material) -> str:
    """Return the whole HTML page; equal material gives equal text. Raises TraceError if a trace's rows are damaged."""
    made, scripts = contents(material), {"vega": runtime(), "page": _file("page.js")}
    return _template().render(
        contents=made,
        columns={name: head for name, head in COLUMNS.items() if _is_known(made, name)},
        data_json=as_json(made.data),
        drawings=as_json({each.name: _drawing(each) for panel in made.panels for each in panel.figures}),
        first=FIRST,
        policy=POLICY.format(" ".join(_hash(text) for text in scripts.values())),
        scripts=scripts,
        style=_file("page.css"),
    )


def as_json(document: Any) -> str:
    """Return JSON for a script element, which its strings can neither end nor turn into a comment."""
    text = json_text(escaped_document(document), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _template() -> Template:
    """Load the template. It escapes everything except our own styles, scripts and JSON, and rejects unknown names."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters |= {"shown": _shown, "ends": _ends, "still": _still, "summary": summary, "meaning": meaning}
    environment.filters |= {"text": _text, "by_standing": _by_standing}
    environment.globals["value"] = value
    return environment.from_string(_file("page.html"))


def _printable(value: Any) -> Any:
    """Escape unprintable characters in foreign texts; our own markup has another type."""
    return escaped_lines(value) if type(value) is str else value


def _file(name: str) -> str:
    return files("moereplay.analysis.report").joinpath(name).read_text("utf-8")


def _hash(script: str) -> str:
    """Hash a script as a browser does: the text between the tags."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _drawing(figure: Figure) -> dict[str, Any]:
    fields = {"x": figure.chart.x.scale == "log", "y": figure.chart.y.scale == "log"}
    return {"spec": compiled(escaped_document(figure.spec())), "logarithmic": fields}


def _still(figure: Figure) -> str:
    return still(escaped_document(figure.spec()))


def _is_known(made: Contents, name: str) -> bool:
    return any(run["figures"][name] is not None for run in made.data["runs"])


def _shown(number: float | None, name: str) -> str:
    if number is None:
        return "-"
    return str(Share(number)) if name in SHARES else cell(number)


def _ends(found: dict[str, Any] | None, name: str) -> str:
    if not found:
        return ""
    return f"{_shown(found['low'], name)} to {_shown(found['high'], name)}"


def _by_standing(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    return [(group, list(found)) for group, found in groupby(runs, lambda run: run["group"])]


def _text(found: Any) -> str:
    return "none" if found in ("", None, []) else str(found)


# Contents

CURVES_ALONE = "Curves alone: no configuration was replayed, so none is fastest."


class Panel(NamedTuple):
    """A case on the page."""

    title: str
    answer: Sequence[str]
    budgets: Sequence[answer.Budget]  #: a row per capacity, if several are compared
    runs: Sequence[Run]  #: best first
    figures: Sequence[Figure]
    varies: Sequence[str]  #: settings that have a column in the ranking
    timed: bool  #: whether any run decodes


class Contents(NamedTuple):
    """The contents of a page: `data` is its JSON and complete, the rest is for the template."""

    data: dict[str, Any]
    panels: Sequence[Panel]
    traces: Sequence[dict[str, Any]]
    platforms: Sequence[dict[str, Any]]
    method: dict[str, Any]


def contents(material: Material) -> Contents:
    """Return the contents of a page. Raises TraceError if the rows of a trace are damaged."""
    found = cases(material)
    every, traces, platforms = runs(found, material), health(material), machines(material)
    panels = [_panel(at, case, found, every, material) for at, case in enumerate(found)] or [
        Panel("", [CURVES_ALONE], [], [], figures.of_curves(material), (), False)
    ]
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


def _named(panel: Panel, several: bool) -> list[str]:
    """Return the sentences of a case, with its title if there are several cases."""
    return [f"{panel.title}: {sentence}" if several else sentence for sentence in panel.answer]


def _best(found: Verdict, every: Sequence[Run]) -> dict[str, Any]:
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
