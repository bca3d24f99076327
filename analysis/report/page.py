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

from moereplay.analysis.metrics import DEFAULTS
from moereplay.analysis.report import figures
from moereplay.analysis.report.cases import Case, Material, Run, cases, interval, runs, title
from moereplay.analysis.report.cautions import cautions, health, machines, method
from moereplay.analysis.report.figures import summary, value
from moereplay.analysis.report.vega import Figure, compiled, runtime, still
from moereplay.analysis.tables import SHARES, Share, cell
from moereplay.analysis.verdict import Condition, Verdict, certainty, listed, name_of_set, paragraph, set_names
from moereplay.results.read import fields, label_of
from moereplay.results.read import runs as tidied
from moereplay.results.remarks import one_label
from moereplay.results.settings import POLICIES, SETTINGS
from moereplay.traces.documents import json_text
from moereplay.traces.schema import Provenance
from moereplay.traces.texts import counted, escaped_document, escaped_lines

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
        columns={
            name: head
            for name, head in COLUMNS.items()
            if any(run["figures"][name] is not None for run in made.data["runs"])
        },
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
    environment.filters |= {
        "shown": _shown,
        "ends": _ends,
        "still": lambda figure: still(escaped_document(figure.spec())),
        "summary": summary,
        "meaning": lambda name: MEANINGS.get(name, ""),
        "text": lambda value: "none" if value in ("", None, []) else str(value),
        "by_standing": lambda runs: [(group, list(of)) for group, of in groupby(runs, lambda run: run["group"])],
    }
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


def _shown(number: float | None, name: str) -> str:
    if number is None:
        return "-"
    return str(Share(number)) if name in SHARES else cell(number)


def _ends(found: dict[str, Any] | None, name: str) -> str:
    if not found:
        return ""
    return f"{_shown(found['low'], name)} to {_shown(found['high'], name)}"


# Contents

CURVES_ALONE = "Curves alone: no configuration was replayed, so none is fastest."


class Panel(NamedTuple):
    """A case on the page."""

    title: str
    answer: Sequence[str]
    budgets: Sequence[Budget]  #: a row per capacity, if several are compared
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
    best = brief(found)
    data = {
        "question": question(material, found),
        "answer": [
            f"{panel.title}: {sentence}" if len(panels) > 1 else sentence
            for panel in panels
            for sentence in panel.answer
        ],
        "budgets": [each._asdict() | {"case": at} for at, case in enumerate(found) for each in budgets(case)],
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
        answer=answers(case),
        budgets=budgets(case),
        runs=own,
        figures=figures.figures(at, case, own, material),
        varies=case.names,
        timed=any(run["figures"]["tokens_per_s"] is not None for run in own),
    )


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


# -- The question that results answer, and the answer in the sentences of the tables (`analysis/verdict.py`)


MEANINGS = {each.name: each.help.partition(":")[0].rstrip(".") for each in SETTINGS} | {
    "model": "The model of the trace",
    "trace": "The recorded routing, by its digest",
    "policy": "The eviction policy of a curve",
    "semantics": "The version of what counters and times mean",
}
#: Settings that are shown even at their default.
ALWAYS = ("model", "platform", "passes", "contract", "scope", *POLICIES)


def answers(case: Case) -> list[str]:
    """Return the verdict on each figure that the case has, or why nothing can be chosen; a table has the first one's.

    The table of `budgets` says where the first figure leads, and how sure that is.
    """
    if case.verdicts:
        told = case.verdicts[1:] if case.conditions else case.verdicts
        parts = [paragraph(found.figure, case.entries, case.names) for found in told]
        return [_sentence(line) for part in parts for line in part.lines]
    if not case.usable:
        return ["Every configuration knows the future, so none can be used."]
    return ["No configuration has a figure to compare."]


def _sentence(line: str) -> str:
    text = line.strip()
    return f"{text[0].upper()}{text[1:]}."


class Budget(NamedTuple):
    """A row of the answer: the best set at one capacity."""

    capacity: str
    best: str
    value: str
    ends: str  #: the interval of its figure; empty if there is none
    second: str
    lead: str
    sure: str
    bound: str  #: the best that knows the future at this capacity


def budgets(case: Case) -> list[Budget]:
    """Return the best set at each capacity by the first figure; none with one capacity, or one set at each."""
    return [_budget(case, each) for each in case.conditions]


def _budget(case: Case, each: Condition) -> Budget:
    found, lead = each.found, each.found.lead
    figure, names = found.figure, set_names(case.names)
    own, bounds = found.own(), [bound for bound in case.bound_conditions if bound.label == each.label]
    known = own is not None and own.low is not None and own.high is not None
    tied = len(found.tied) > 1
    return Budget(
        capacity=each.label,
        best=listed(found.tied, names),
        value=figure.shown(found.value),
        ends=f"{figure.end(own.low or 0)} to {figure.end(own.high or 0)}" if own and known else "",
        second=name_of_set(found.second, names) if found.second and not tied else "",
        lead=figure.more(lead.more, lead.below) if lead and not tied else "",
        sure=certainty(found, lead) if lead and not tied else "",
        bound=figure.shown(bounds[0].found.value) if bounds else "",
    )


def brief(cases: Sequence[Case]) -> Verdict | None:
    """Return the fastest of all cases, or the one with most hits where nothing decodes."""
    firsts = [each.verdicts[0] for each in cases if each.verdicts]
    fastest = [each for each in firsts if each.figure.name == "tokens_per_s"] or firsts
    return max(fastest, key=lambda each: each.value, default=None)


def question(material: Material, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the question as a sentence and as settings: `varies` name -> values, `constant` name -> value."""
    if material.frame.is_empty():
        return _of_curves(material)
    table = tidied(material.frame)
    known = [name for name in fields(material.frame) if name in table.columns]
    values = {name: _values(table[name].to_list()) for name in known}
    return {
        "text": _asked(material, cases),
        "label": label_of(material.frame),
        "traces": [_trace(material, digest) for digest in values["trace"]],
        "platforms": values["platform"],
        "varies": {name: found for name, found in values.items() if len(found) > 1},
        "constant": {
            name: one
            for name, (one, *more) in values.items()
            if not more and (name in ALWAYS or (name in DEFAULTS and one not in (DEFAULTS[name], "", None)))
        },
    }


def _of_curves(material: Material) -> dict[str, Any]:
    curves = material.curves
    models, digests = (curves[name].unique().sort().to_list() for name in ("model", "trace"))
    text = f"How does the hit rate of {', '.join(models)} grow with the capacity? Curves alone: nothing was timed."
    traces = [_trace(material, digest) for digest in digests]
    varies = {"policy": curves["policy"].unique().sort().to_list()}
    return {
        "text": text,
        "label": one_label(curves["label"]),
        "traces": traces,
        "platforms": [],
        "varies": varies,
        "constant": {},
    }


def _asked(material: Material, cases: Sequence[Case]) -> str:
    models = dict.fromkeys(_model_of(material, case) for case in cases)
    platforms = dict.fromkeys(str(case.shared["platform"]) for case in cases)
    decodes = any(case.verdicts and case.verdicts[0].figure.name == "tokens_per_s" for case in cases)
    places = ", ".join(platforms)
    of = counted(len(material.frame), "cache configuration")
    sizes = max((len(case.conditions) for case in cases), default=0)
    if sizes:
        wanted = "decode fastest" if decodes else "hit most"
        return f"Which policies {wanted} at each of {sizes} capacities for {', '.join(models)} on {places}?"
    return f"Which of {of} {'decodes fastest' if decodes else 'hits most'} for {', '.join(models)} on {places}?"


def _model_of(material: Material, case: Case) -> str:
    """Return the model's name, or the trace's where the model has none."""
    name = str(case.shared["model"])
    return material.sources[case.shared["trace"]].name if name == Provenance().model else name


def _trace(material: Material, digest: str) -> dict[str, Any]:
    return {"digest": digest, "name": material.sources[digest].name}


def _values(found: Sequence[Any]) -> list[Any]:
    """Return distinct values, numbers by size and texts by name."""
    return sorted(set(found), key=lambda value: (value is None, _size(value), str(value)))


def _size(value: Any) -> float:
    """Return the leading number of a capacity, so that 5% sorts before 25%."""
    text = str(value)
    digits = next((text[:end] for end in range(len(text), 0, -1) if text[:end].replace(".", "", 1).isdecimal()), "")
    return float(digits) if digits else float("inf")
