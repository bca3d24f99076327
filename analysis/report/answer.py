"""The question that results answer, and the answer in the sentences of the tables (`analysis/sentences.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moereplay.analysis.metrics import DEFAULTS
from moereplay.analysis.report.cases import Case, Material
from moereplay.analysis.sentences import Condition, certainty, paragraph, set_names
from moereplay.analysis.verdict import Verdict, listed, name_of_set
from moereplay.results.read import fields, label_of, runs
from moereplay.results.settings import POLICIES, SETTINGS
from moereplay.traces.texts import counted

MEANINGS = {each.name: each.help.partition(":")[0].rstrip(".") for each in SETTINGS} | {
    "model": "The model of the trace",
    "trace": "The recorded routing, by its digest",
    "policy": "The eviction policy of a curve",
    "semantics": "The version of what counters and times mean",
}
#: Settings that are shown even at their default.
ALWAYS = ("model", "platform", "passes", "contract", "scope", *POLICIES)


def sentences(case: Case) -> list[str]:
    """Return the verdict on each figure that the case has, or why nothing can be chosen."""
    if case.verdicts:
        parts = [paragraph(found.figure, case.entries, case.names) for found in case.verdicts]
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
    table = runs(material.frame)
    known = [name for name in fields(material.frame) if name in table.columns]
    values = {name: _values(table[name].to_list()) for name in known}
    return {
        "text": _asked(material, cases),
        "label": label_of(material.frame),
        "traces": [_trace(material, digest) for digest in values["trace"]],
        "platforms": values["platform"],
        "varies": {name: found for name, found in values.items() if len(found) > 1},
        "constant": {name: found[0] for name, found in values.items() if len(found) == 1 and _is_said(name, found[0])},
    }


def _of_curves(material: Material) -> dict[str, Any]:
    curves = material.curves
    models, digests = (curves[name].unique().sort().to_list() for name in ("model", "trace"))
    text = f"How does the hit rate of {', '.join(models)} grow with the capacity? Curves alone: nothing was timed."
    traces = [_trace(material, digest) for digest in digests]
    varies = {"policy": curves["policy"].unique().sort().to_list()}
    return {
        "text": text,
        "label": " / ".join(curves["label"].unique().sort()),
        "traces": traces,
        "platforms": [],
        "varies": varies,
        "constant": {},
    }


def _asked(material: Material, cases: Sequence[Case]) -> str:
    models = dict.fromkeys(str(case.shared["model"]) for case in cases)
    platforms = dict.fromkeys(str(case.shared["platform"]) for case in cases)
    decodes = any(case.verdicts and case.verdicts[0].figure.name == "tokens_per_s" for case in cases)
    places = ", ".join(platforms)
    asked = "decodes fastest" if decodes else "hits most"
    of = counted(len(material.frame), "cache configuration")
    sizes = max((len(case.conditions) for case in cases), default=0)
    if sizes:
        return f"Which policies {_plural(asked)} at each of {sizes} capacities for {', '.join(models)} on {places}?"
    return f"Which of {of} {asked} for {', '.join(models)} on {places}?"


def _plural(asked: str) -> str:
    return asked.replace("decodes", "decode").replace("hits", "hit")


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


def _is_said(name: str, value: Any) -> bool:
    return name in ALWAYS or (name in DEFAULTS and value not in (DEFAULTS[name], "", None))


def meaning(name: str) -> str:
    """Explain what a setting controls."""
    return MEANINGS.get(name, "")
