"""The answer of a case, in sentences: which is best, by how much, and whether that can be told from noise."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.bootstrap import FEW, Interval
from analysis.comparisons import YES
from analysis.report.cases import Case
from analysis.tables import counted
from analysis.verdict import Entry, Verdict, called, differing, listed

TITLES = {"tokens_per_s": "Fastest", "hit_rate": "Most hits"}
MORE = {"tokens_per_s": "faster than", "hit_rate": "above"}


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
    if found.second is None or len(found.tied) > 1:
        return []
    below, beside = getattr(found.second, found.figure.name), found.beside_second
    more = found.value - below
    other = called(found.second, differing(found.best, found.second, case.names))
    said = f"It is {found.figure.more(more, below)} {MORE[found.figure.name]} the next, {other}"
    if beside.off is None:
        return [f"{said}; whether that is noise cannot be told {_why(beside.requests)}."]
    wide = f"± {found.figure.more(beside.off, below)} over {counted(beside.requests, 'request')}"
    if beside.answer == YES:
        return [f"{said}, {wide}: more than noise."]
    doubt = "which may be luck among so many" if beside.off < more else "which cannot be told from noise"
    return [f"{said}, {doubt}: {wide}."]


def _why(requests: int) -> str:
    if not requests:
        return "without rows of requests"
    return "from one request" if requests == 1 else "from these requests"


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
