"""The best of some configurations by a figure, its comparison with the others, and how certain its lead is.

Configurations that know the future cannot be used and never win. Requests are the samples
(docs/statistics.md): the winner is compared with every other configuration over the same trace, corrected for their
number. Configurations that differ only in the platform are compared request by request. `sentences.py` puts verdicts
into words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moereplay.analysis.comparisons import (
    FEW,
    NOTHING,
    TEST_LEVEL,
    YES,
    Comparison,
    Counted,
    against,
    by_count,
    compare,
    estimate,
    same_decisions,
)
from moereplay.analysis.statistics import Interval
from moereplay.analysis.tables import cell
from moereplay.results.settings import NAMES
from moereplay.traces.texts import percent, points

#: Settings that the second shares with the best if possible: policies are compared, not machines.
ALIKE = ("model", "trace", "passes", "arrivals", "platform", "capacity")
#: Settings that are not policies' to choose. Where they vary, each value has its own winner: more memory always wins,
#: and so does an idle server.
CONDITIONS = ("model", "trace", "passes", "arrivals", "capacity")
SHOWN_TIED = 3


#: Returns whether one of a row's policies, by kind, knows the future.
Foresight = Callable[[Mapping[str, Any]], bool]


class Entry(NamedTuple):
    """A configuration with its figures and request rows."""

    settings: Mapping[str, Any]  #: those that name it, and `ALIKE`
    tokens_per_s: float | None
    hit_rate: float | None
    requests: Callable[[], Sequence[Mapping[str, Any]]]  #: its per-request rows; none if they were not stored
    foresees: bool = False  #: whether one of its policies knows the future
    synthetic: bool = False  #: whether its routing is synthetic; `requests` then has no rows
    every: Callable[[], Sequence[Mapping[str, Any]]] | None = None  #: as `requests`, with those of synthetic routing

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows of requests for exact counts; synthetic routing has them too, `requests` then has none."""
        return (self.every or self.requests)()


@dataclass(frozen=True)
class Figure:
    """A quantity by which configurations are ranked, and how its values and differences are printed."""

    best: str
    name: str  #: field of `Entry`
    title: str  #: in words
    more_is: str  #: comparative for one request
    shown: Callable[[float], str]
    end: Callable[[float], str]  #: formats an end of an interval
    more: Callable[[float, float], str]  #: formats a difference, given the second's value


FIGURES = (
    Figure(
        "fastest",
        "tokens_per_s",
        "tokens/s",
        "faster",
        lambda value: f"{cell(value)} tokens/s",
        cell,
        lambda more, second: percent(more / second) if second else cell(more),
    ),
    Figure(
        "most hits",
        "hit_rate",
        "hit rate",
        "more hits",
        lambda value: f"{100 * value:.2f}%",
        lambda value: f"{100 * value:.2f}",
        lambda more, _: points(more),
    ),
)


#: Certainty of a lead. No interval: no rows, one request, fewer than `FEW`, shared passes, or another reason. Tested:
#: significant, significant before the correction only, or not significant. Counted: only the platform differs.
NO_ROWS, ONE_REQUEST, FEWER, SHARED, UNKNOWN = "no rows", "one request", "few", "shared", "unknown"
SURE, LUCK, NOISE, COUNTED = "sure", "luck", "noise", "counted"
GENERATED = "generated"  #: synthetic routing says nothing of a lead on a real trace


class Lead(NamedTuple):
    """The best configuration compared with the second."""

    more: float  #: the best's figure minus the second's
    below: float  #: the second's
    off: float | None  #: half the 95 % CI of the difference, if known
    requests: int
    certainty: str
    counted: Counted | None = None  #: where only the platform differs
    p: float | None = None  #: before the correction for many comparisons

    @property
    def contradicts(self) -> bool:
        """Whether the interval and the test differ on whether there is a lead."""
        return self.off is not None and self.p is not None and (self.off < self.more) != (self.p < TEST_LEVEL)


class Rival(NamedTuple):
    """Another configuration over the same requests, with the winner's comparison against it."""

    entry: Entry
    beside: Comparison
    exact: bool = False  #: whether they can differ in time alone: counted, not tested


class Verdict(NamedTuple):
    """The best configurations by one figure, and their rivals."""

    figure: Figure
    tied: Sequence[Entry]  #: the best, and all that have exactly its figure
    rivals: Sequence[Rival]  #: the others that replay the same requests, best first
    second: Entry | None  #: the best of the rest with the same conditions

    @property
    def best(self) -> Entry:
        """The first of the tied winners."""
        return self.tied[0]

    @property
    def value(self) -> float:
        """The winner's figure."""
        return getattr(self.best, self.figure.name)

    @property
    def lead(self) -> Lead | None:
        """The lead over the second; None if there is no second."""
        if self.second is None:
            return None
        rival = next((each for each in self.rivals if each.entry is self.second), None)
        beside = rival.beside if rival else NOTHING
        below = getattr(self.second, self.figure.name)
        more = self.value - below
        counted = beside.counted if rival and rival.exact else None
        certainty = COUNTED if counted else GENERATED if self.best.synthetic else _certainty(beside)
        return Lead(more, below, beside.off, beside.requests, certainty, counted, beside.alone)

    @property
    def as_good(self) -> list[Entry]:
        """Rivals that are statistically tied with the winner."""
        return [
            each.entry
            for each in self.rivals
            if each.beside.answer != YES and (each.beside.tested or (each.exact and each.beside.requests))
        ]

    @property
    def tested(self) -> list[Rival]:
        """Rivals with a statistical test; those compared request by request are not among them."""
        return [each for each in self.rivals if each.beside.p is not None and not each.exact]

    @property
    def samples(self) -> int:
        """The fewest requests of any test; 0 without a test."""
        return min((each.beside.requests for each in self.tested), default=0)

    def own(self) -> Interval | None:
        """Return the interval of the winner's own figure; None if no request has the figure."""
        return estimate(self.best.requests(), self.figure.name)


def lacking(requests: int) -> str:
    """Return why fewer than `FEW` requests have no interval."""
    return (NO_ROWS, ONE_REQUEST, FEWER)[min(requests, 2)]


def _certainty(beside: Comparison) -> str:
    if beside.shared:
        return SHARED
    if beside.requests < FEW:
        return lacking(beside.requests)
    if beside.alone is None:
        return UNKNOWN
    if beside.answer == YES:
        return SURE
    return LUCK if beside.alone < TEST_LEVEL else NOISE


def verdict(figure: Figure, entries: Sequence[Entry]) -> Verdict | None:
    """Return the verdict on these configurations; None if none has the figure."""
    known = ranked(figure, entries)
    if not known:
        return None
    tied = tied_first(figure, known)
    return Verdict(figure, tied, _rivals(figure, known[0], known), _second(known[0], known))


def ranked(figure: Figure, entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that have the figure, best first; equal ones keep their order."""
    known = [entry for entry in entries if getattr(entry, figure.name) is not None]
    return sorted(known, key=lambda entry: -getattr(entry, figure.name))


def tied_first(figure: Figure, known: Sequence[Entry]) -> list[Entry]:
    """Return all entries with exactly the figure of the first."""
    return [entry for entry in known if getattr(entry, figure.name) == getattr(known[0], figure.name)]


def _rivals(figure: Figure, first: Entry, known: Sequence[Entry]) -> list[Rival]:
    ours = [first.settings.get(name) for name in ALIKE[:2]]
    others = [each for each in known[1:] if [each.settings.get(name) for name in ALIKE[:2]] == ours]
    timed = figure.name == "tokens_per_s"
    exact = [timed and same_routing(first, each) for each in others]
    rows = [each.requests() for each in others]
    found = against(first.requests(), rows, figure.name, picked=True, exact=exact)
    found = [
        by_count(compare(first.rows, each.rows, figure.name), figure.name) if counts and first.synthetic else made
        for each, made, counts in zip(others, found, exact, strict=True)
    ]
    return [Rival(*each) for each in zip(others, found, exact, strict=True)]


def same_routing(first: Entry, second: Entry) -> bool:
    """Return whether two configurations can differ in time alone: another platform, or the same decisions for every
    request.
    """
    settings = (*ALIKE[:3], *NAMES)
    unlike = {name for name in settings if first.settings.get(name) != second.settings.get(name)}
    return unlike == {"platform"} or same_decisions(first.rows, second.rows)


def independent(entry: Entry) -> bool:
    """Return whether every request starts with an empty cache and runs alone."""
    return entry.settings.get("reset") == "request" and not str(entry.settings.get("passes")).startswith("batch")


def _second(first: Entry, known: Sequence[Entry]) -> Entry | None:
    """Return the next best entry on the same machine and capacity, or else of the same passes, or of the same trace."""
    for alike in (ALIKE, ALIKE[:3], ALIKE[:2]):
        ours = [first.settings.get(name) for name in alike]
        for entry in known[1:]:
            if [entry.settings.get(name) for name in alike] == ours:
                return entry
    return None


def differing(first: Entry, second: Entry, names: Sequence[str]) -> list[str]:
    """Return the settings in which two entries differ."""
    return [name for name in names if first.settings.get(name) != second.settings.get(name)]


def listed(tied: Sequence[Entry], names: Sequence[str]) -> str:
    """Return the names of the first entries and the number of the rest."""
    shown = [name_of_set(entry, names) for entry in tied[:SHOWN_TIED]]
    if len(tied) == 1:
        return shown[0]
    if len(tied) > SHOWN_TIED:
        return f"{'; '.join(shown)} and {len(tied) - SHOWN_TIED:,} more"
    return f"{'; '.join(shown[:-1])} and {shown[-1]}"


def name_of_set(entry: Entry, names: Sequence[str]) -> str:
    """Name an entry: policies by their names, other settings as `name value`, the capacity last (lru, scope global at
    50%).
    """
    plain = ("preset", "eviction", "prefetch", "miss", "routing")
    words = [
        str(entry.settings[name]) if name in plain else f"{name} {entry.settings[name]}"
        for name in names
        if name != "capacity"
    ]
    if "capacity" not in names:
        return ", ".join(words)
    return f"{', '.join(words) or 'capacity'} {'at ' if words else ''}{entry.settings['capacity']}"
