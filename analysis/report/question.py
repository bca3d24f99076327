"""The question that results answer: of which traces and machines, what varies, and what all have alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moereplay.analysis.metrics import DEFAULTS
from moereplay.analysis.report.cases import Case
from moereplay.analysis.report.material import Material
from moereplay.analysis.tables import counted
from moereplay.results.read import fields, label_of, runs
from moereplay.results.settings import POLICIES, SETTINGS

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
        "text": _sentence(material, cases),
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


def _sentence(material: Material, cases: Sequence[Case]) -> str:
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
