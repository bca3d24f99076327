"""The answer of a case, in sentences: which is best, by how much, and whether that can be told from noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moereplay.analysis.metrics import DEFAULTS
from moereplay.analysis.report.cases import Case, Material
from moereplay.analysis.sentences import Given, bounds_of, certainty, each_given, of_each
from moereplay.analysis.statistics import FEW, Interval
from moereplay.analysis.tables import counted
from moereplay.analysis.verdict import GIVEN, Entry, Verdict, called, differing, listed
from moereplay.results.read import fields, label_of, runs
from moereplay.results.settings import POLICIES, SETTINGS

TITLES = {"tokens_per_s": "Fastest", "hit_rate": "Most hits"}
MORE = {"tokens_per_s": "faster than", "hit_rate": "above"}


def sentences(case: Case) -> list[str]:
    """For each figure that the case has; what knows the future comes last, as a bound."""
    return [sentence for each in case.verdicts for sentence in _judged(case, each)] + _without(case)


def _judged(case: Case, found: Verdict) -> list[str]:
    """The best at each capacity where these vary, or the best of all."""
    if given := each_given(found.figure, case.usable):
        said, _ = of_each(found.figure, given, case.names)
        bounds = bounds_of(found.figure, case.foreseeing, case.names)
        return [_sentence(line) for line in (*said, *bounds)]
    return [*_best(case, found), *_beside(case, found), *_as_good(case, found), *_bound(case, found)]


def _sentence(line: str) -> str:
    text = line.strip()
    return f"{text[0].upper()}{text[1:]}."


class Budget(NamedTuple):
    """A row of the answer: the best at one capacity."""

    capacity: str
    best: str
    value: str
    ends: str  #: of its own interval; empty where there is none
    second: str
    lead: str
    sure: str
    bound: str  #: what knows the future reaches there


def budgets(case: Case) -> list[Budget]:
    """The best at each capacity by the first figure; none where there is one capacity, or one set at each."""
    return [_budget(case, each) for each in case.given]


def _budget(case: Case, each: Given) -> Budget:
    found, lead = each.found, each.found.lead
    figure, names = found.figure, [name for name in case.names if name not in GIVEN] or ["eviction"]
    own, beyond = found.own(), [given for given in case.bounds_given if given.label == each.label]
    known = own is not None and own.low is not None and own.high is not None
    tied = len(found.tied) > 1
    return Budget(
        capacity=each.label,
        best=listed(found.tied, names),
        value=figure.shown(found.value),
        ends=f"{figure.end(own.low or 0)} to {figure.end(own.high or 0)}" if own and known else "",
        second=called(found.second, names) if found.second and not tied else "",
        lead=figure.more(lead.more, lead.below) if lead and not tied else "",
        sure=certainty(found, lead) if lead and not tied else "",
        bound=figure.shown(beyond[0].found.value) if beyond else "",
    )


def _best(case: Case, found: Verdict) -> str:
    shown, many = found.figure.shown(found.value), len(case.usable)
    if many == 1:
        return f"{case.label(found.best)}: {shown}{interval_said(found)}. It is the only configuration."
    if len(found.tied) > 1:
        tied = listed(found.tied, case.names)
        return f"{TITLES[found.figure.name]} of {many:,}: a tie of {tied}, {shown} each{interval_said(found)}."
    return f"{TITLES[found.figure.name]} of {many:,}: {case.label(found.best)}, {shown}{interval_said(found)}."


def interval_said(found: Verdict) -> str:
    """The 95 % interval of the best's own figure in brackets; nothing where there is none."""
    own, end = found.own(), found.figure.end
    if own is None or own.low is None or own.high is None:
        return ""
    return f" (95% CI {end(own.low)} to {end(own.high)}{roughly(own)})"


def roughly(own: Interval) -> str:
    """That an interval of few requests is rough."""
    return f", rough: of {counted(own.requests, 'request')}" if own.requests < FEW else ""


def _beside(case: Case, found: Verdict) -> list[str]:
    """The best beside the second of the same capacity."""
    lead = found.lead
    if lead is None or found.second is None or len(found.tied) > 1:
        return []
    other = called(found.second, differing(found.best, found.second, case.names))
    more = found.figure.more(lead.more, lead.below)
    return [f"It is {more} {MORE[found.figure.name]} the next, {other} ({certainty(found, lead)})."]


def _as_good(case: Case, found: Verdict) -> list[str]:
    tied = {id(entry) for entry in found.tied}
    alike, many = [entry for entry in found.as_good if id(entry) not in tied], len(found.rivals) + 1 - len(tied)
    if not alike or many < 2:
        return []
    best = "it" if len(tied) == 1 else "them"
    return [f"{len(alike):,} of the {many:,} others are statistically tied with {best}: {listed(alike, case.names)}."]


def _bound(case: Case, found: Verdict) -> list[str]:
    best: Entry | None = case.bounds.get(found.figure.name)
    if best is None:
        return []
    shown = found.figure.shown(getattr(best, found.figure.name))
    return [f"Upper bound: {case.label(best)}, which knows the future, reaches {shown}."]


def _without(case: Case) -> list[str]:
    """What to say where nothing can be chosen."""
    if case.verdicts:
        return []
    if not case.usable:
        return ["Every configuration knows the future: these are bounds, and there is nothing to choose."]
    return ["No configuration has a figure to judge it by."]


def brief(cases: Sequence[Case]) -> Verdict | None:
    """The fastest of all cases; the one with most hits where nothing decodes."""
    firsts = [each.verdicts[0] for each in cases if each.verdicts]
    fastest = [each for each in firsts if each.figure.name == "tokens_per_s"] or firsts
    return max(fastest, key=lambda each: each.value, default=None)


# -- The question that results answer: of which traces and machines, what varies, and what all have alike.

MEANINGS = {each.name: each.help.partition(":")[0].rstrip(".") for each in SETTINGS} | {
    "model": "The model of the trace",
    "trace": "The recorded routing, by its digest",
    "policy": "The eviction policy of a curve",
    "semantics": "The version of what counters and times mean",
}
#: Said although they are at their default.
ALWAYS = ("model", "platform", "passes", "contract", "scope", *POLICIES)


def question(material: Material, cases: Sequence[Case]) -> dict[str, Any]:
    """In a sentence, and as settings: `varies` name -> values, `constant` name -> value."""
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
    sizes = max((len(case.given) for case in cases), default=0)
    if sizes:
        return f"Which policies {_plural(asked)} at each of {sizes} capacities for {', '.join(models)} on {places}?"
    return f"Which of {of} {asked} for {', '.join(models)} on {places}?"


def _plural(asked: str) -> str:
    return asked.replace("decodes", "decode").replace("hits", "hit")


def _trace(material: Material, digest: str) -> dict[str, Any]:
    return {"digest": digest, "name": material.sources[digest].name}


def _values(found: Sequence[Any]) -> list[Any]:
    """Each once, numbers by size and texts by name."""
    return sorted(set(found), key=lambda value: (value is None, _size(value), str(value)))


def _size(value: Any) -> float:
    """The number that a capacity begins with, so that 5% comes before 25%."""
    text = str(value)
    digits = next((text[:end] for end in range(len(text), 0, -1) if text[:end].replace(".", "", 1).isdecimal()), "")
    return float(digits) if digits else float("inf")


def _is_said(name: str, value: Any) -> bool:
    return name in ALWAYS or (name in DEFAULTS and value not in (DEFAULTS[name], "", None))


def meaning(name: str) -> str:
    """What a setting decides, in words."""
    return MEANINGS.get(name, "")
