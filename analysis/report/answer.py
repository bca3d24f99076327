"""The answer of a case, in sentences: which is best, by how much, and whether that can be told from noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moereplay.analysis.bootstrap import FEW, Interval
from moereplay.analysis.report.cases import Case
from moereplay.analysis.sentences import Given, bounds_of, certainty, each_given, of_each
from moereplay.analysis.tables import counted
from moereplay.analysis.verdict import GIVEN, Entry, Verdict, called, differing, listed

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
