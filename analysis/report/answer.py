"""The answer of a case, in sentences: which is best, by how much, and whether that can be told from noise."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.bootstrap import FEW, Interval
from analysis.report.cases import Case
from analysis.tables import counted
from analysis.verdict import (
    GENERATED,
    LUCK,
    NO_ROWS,
    NOISE,
    ONE_REQUEST,
    SURE,
    UNKNOWN,
    Entry,
    Verdict,
    called,
    differing,
    listed,
)

TITLES = {"tokens_per_s": "Fastest", "hit_rate": "Most hits"}
MORE = {"tokens_per_s": "faster than", "hit_rate": "above"}
#: Of a lead, by what is known of it.
UNTOLD = {
    NO_ROWS: "without rows of requests",
    ONE_REQUEST: "from one request",
    UNKNOWN: "from these requests",
    GENERATED: "from synthetic routing",
}
TOLD = {
    SURE: "{}: more than noise",
    LUCK: "which may be luck among so many: {}",
    NOISE: "which cannot be told from noise: {}",
}


def sentences(case: Case) -> list[str]:
    """For each figure that the case has; what knows the future comes last, as a bound."""
    return [sentence for each in case.verdicts for sentence in _judged(case, each)] + _without(case)


def _judged(case: Case, found: Verdict) -> list[str]:
    return [_best(case, found), *_beside(case, found), *_as_good(case, found), *_bound(case, found)]


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
    return f" (95% interval {end(own.low)} to {end(own.high)}{roughly(own)})"


def roughly(own: Interval) -> str:
    """That an interval of few requests is rough."""
    return f", rough: of {counted(own.requests, 'request')}" if own.requests < FEW else ""


def _beside(case: Case, found: Verdict) -> list[str]:
    """The best beside the second of the same capacity."""
    lead = found.lead
    if lead is None or found.second is None or len(found.tied) > 1:
        return []
    other = called(found.second, differing(found.best, found.second, case.names))
    said = f"It is {found.figure.more(lead.more, lead.below)} {MORE[found.figure.name]} the next, {other}"
    if lead.off is None or lead.certainty in UNTOLD:
        return [f"{said}; whether that is noise cannot be told {UNTOLD[lead.certainty]}."]
    wide = f"± {found.figure.more(lead.off, lead.below)} over {counted(lead.requests, 'request')}"
    return [f"{said}, {TOLD[lead.certainty].format(wide)}."]


def _as_good(case: Case, found: Verdict) -> list[str]:
    tied = {id(entry) for entry in found.tied}
    alike, many = [entry for entry in found.as_good if id(entry) not in tied], len(found.rivals) + 1 - len(tied)
    if not alike or many < 2:
        return []
    best = "it" if len(tied) == 1 else "them"
    return [f"{len(alike):,} of the {many:,} others cannot be told from {best}: {listed(alike, case.names)}."]


def _bound(case: Case, found: Verdict) -> list[str]:
    best: Entry | None = case.bounds.get(found.figure.name)
    if best is None:
        return []
    shown = found.figure.shown(getattr(best, found.figure.name))
    return [f"With knowledge of the future, which no system has, {case.label(best)} reaches {shown}: a bound."]


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
