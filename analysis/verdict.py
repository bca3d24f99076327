"""The best of some configurations by a figure, how certain its lead over the others is, and the sentences that say so.

Configurations that know the future cannot be used and never win. Requests are the samples
(docs/statistics.md): the winner is compared with every other configuration over the same trace, corrected for their
number. Configurations that differ only in the platform are compared request by request. Where capacities, traces or
schedules vary, each has its own winner, because more memory always wins.

Tables of `replay` and `sweep show` print the sentences, and the page of `report` shows the same ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moereplay.analysis.comparisons import (
    FEW,
    NOTHING,
    SHARE_PASSES,
    TEST_LEVEL,
    TOO_FEW,
    YES,
    Comparison,
    Counted,
    against,
    by_count,
    compare,
    enough,
    estimate,
    pairs_of,
    same_decisions,
)
from moereplay.analysis.statistics import Interval
from moereplay.analysis.tables import cell
from moereplay.results.serving import rate_of
from moereplay.results.settings import NAMES
from moereplay.traces.texts import between, counted, digits, percent, points

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
    rows: Callable[[], Sequence[Mapping[str, Any]]]  #: its per-request rows; none if they were not stored
    foresees: bool = False  #: whether one of its policies knows the future
    synthetic: bool = False  #: whether its routing is synthetic

    def requests(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows as samples: none of synthetic routing, whose spread is only that of its generator."""
        return () if self.synthetic else self.rows()


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
            rival.entry
            for rival in self.rivals
            if rival.beside.answer != YES and (rival.beside.tested or (rival.exact and rival.beside.requests))
        ]

    @property
    def tested(self) -> list[Rival]:
        """Rivals with a statistical test; those compared request by request are not among them."""
        return [rival for rival in self.rivals if rival.beside.p is not None and not rival.exact]

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
    exact = [timed and same_routing(first, other) for other in others]
    rows = [other.requests() for other in others]
    found = against(first.requests(), rows, figure.name, picked=True, exact=exact)
    found = [
        by_count(compare(first.rows(), each.rows(), figure.name), figure.name) if counts and first.synthetic else made
        for each, made, counts in zip(others, found, exact, strict=True)
    ]
    return [Rival(*each) for each in zip(others, found, exact, strict=True)]


def same_routing(first: Entry, second: Entry) -> bool:
    """Return whether two configurations can differ in time alone: another platform, or the same decisions for every
    request.
    """
    settings = (*ALIKE[:3], *NAMES)
    unlike = {name for name in settings if first.settings.get(name) != second.settings.get(name)}
    return unlike == {"platform"} or same_decisions(first.rows(), second.rows())


def independent(settings: Mapping[str, Any]) -> bool:
    """Return whether every request starts with an empty cache and runs alone."""
    return settings.get("reset") == "request" and not str(settings.get("passes")).startswith("batch")


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


MOST_LISTED = 60  #: characters of a list of experts that is written out


def _listed(value: object) -> str:
    """Return a setting as text; of a long list of experts the number, and a digest that tells it apart."""
    text = str(value)
    if len(text) <= MOST_LISTED or not text.replace(":", "").replace(" ", "").isdigit():
        return text or "none"
    return f"{counted(len(text.split()), 'expert')} ({hashlib.sha256(text.encode()).hexdigest()[:6]})"


def name_of_set(entry: Entry, names: Sequence[str]) -> str:
    """Name an entry: policies by their names, other settings as `name value`, the capacity last (lru, scope global at
    50%).
    """
    plain = ("preset", "eviction", "prefetch", "miss", "routing")
    words = [
        str(entry.settings[name]) if name in plain else f"{name} {_listed(entry.settings[name])}"
        for name in names
        if name != "capacity"
    ]
    if "capacity" not in names:
        return ", ".join(words)
    return f"{', '.join(words) or 'capacity'} {'at ' if words else ''}{entry.settings['capacity']}"


# Sentences

FORESEES = "knows the future"
NOT_TESTED = f"  {FORESEES} (not tested): "
NO_TPOT = (
    "no TPOT and no tokens/s: no pass decodes, as in text that was recorded in one pass;",
    "  --passes decode:N treats the tokens from position N on as decoded, one per pass",
)
NO_TIME = (
    "no tokens/s: decode passes take no time, as they demand no expert and dense layers are free;",
    "  `moereplay inspect` lists tokens that are not routed, --model adds the time of dense layers",
)
#: Reasons for a missing interval.
NO_INTERVAL = {
    NO_ROWS: "no confidence interval: per-request rows were not stored (set `requests = true`)",
    ONE_REQUEST: "no confidence interval: one request",
    FEWER: f"no confidence interval: {TOO_FEW}",
    SHARED: f"no confidence interval: {SHARE_PASSES}",
    UNKNOWN: "no confidence interval",
    GENERATED: "no confidence interval: the routing is synthetic",
}
WORDS = {"passes": "schedule of passes", "arrivals": "rate of arrivals"}
MOST_NAMED = 3  #: most winning sets that are named, and most of those that know the future
MOST_PLACES = 6  #: capacities that are listed for one set


def lines(entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """Return the verdict on each figure, then what limits it; with one entry, only why it has no tokens/s.

    `names` are the settings that name a configuration.
    """
    parts = [paragraph(figure, entries, names) for figure in FIGURES] if len(entries) > 1 else []
    body = [line for part in parts for line in part.lines]
    few = _too_few([each for part in parts for each in part.few])
    return [*untimed(entries), *body, *few, *_unlike(parts), *_caution(entries, body)]


def untimed(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return why entries have no tokens/s, in lines; none if all have."""
    tpots = [entry.settings.get("tpot_ms") for entry in entries if entry.tokens_per_s is None]
    return (NO_TPOT if None in tpots else ()) + (NO_TIME if 0 in tpots else ())


class Paragraph(NamedTuple):
    """The verdict on one figure in lines."""

    figure: Figure
    lines: Sequence[str]
    few: Sequence[Verdict] = ()  #: verdicts that need more requests
    lead: Lead | None = None  #: of a single winner


def paragraph(figure: Figure, entries: Sequence[Entry], names: Sequence[str]) -> Paragraph:
    """Return the best usable configuration, at each capacity where these vary, and the best that knows the future.

    A figure that no entry has gives no line.
    """
    usable, foreseeing = (
        ranked(figure, [entry for entry in entries if entry.foresees is foresees]) for foresees in (False, True)
    )
    bounds = _bounds(figure, foreseeing, names)
    if conditions := by_condition(figure, usable):
        body, few = _at_each(figure, conditions, names)
        return Paragraph(figure, [*body, *bounds], few)
    if not usable and foreseeing:
        return Paragraph(figure, [f"{FORESEES}, {figure.title}: {bounds[0].partition(': ')[2]}"])
    best = _best(figure, usable, names)
    return best._replace(lines=[*best.lines, *bounds])


def _unlike(parts: Sequence[Paragraph]) -> list[str]:
    """Say which figures have a significant lead, if some have and others have not."""
    leads = {part.figure.title: part.lead for part in parts if part.lead and part.lead.certainty in TESTED}
    sure = {name: lead.certainty == SURE for name, lead in leads.items()}
    if len(set(sure.values())) < 2:
        return []
    words = [f"{'significant' if is_sure else 'not significant'} in {name}" for name, is_sure in sure.items()]
    return [f"  {'; '.join(words)} (n = {_n(min(lead.requests for lead in leads.values()))})"]


# At each capacity, trace and schedule


class Condition(NamedTuple):
    """A capacity, trace and schedule, and the verdict on the configurations that share it."""

    label: str  #: as the user typed it
    found: Verdict


def by_condition(figure: Figure, entries: Sequence[Entry]) -> list[Condition]:
    """Return the verdict under each condition, smallest capacity first; none where conditions do not vary."""
    known = [entry for entry in entries if getattr(entry, figure.name) is not None]
    varying = _conditions_of([entry.settings for entry in known])
    groups: dict[tuple[str, ...], list[Entry]] = {}

    def order(entry: Entry) -> tuple[str, float]:
        return str(entry.settings.get("trace")), float(entry.settings.get("capacity_bytes") or 0)

    for entry in sorted(known, key=order):
        texts = {name: str(entry.settings.get(name)) for name in varying}
        key = tuple(text[:8] if name == "trace" else text for name, text in texts.items())
        groups.setdefault(key, []).append(entry)
    if len(groups) < 2:
        return []
    labels = {key: key[0] if varying == ["capacity"] else _label(varying, key) for key in groups}
    found = ((labels[key], verdict(figure, group)) for key, group in groups.items())
    return [Condition(label, each) for label, each in found if each is not None]


def _conditions_of(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the conditions that vary; a trace is called by its model where each model has one."""
    found = {name: {str(setting.get(name)) for setting in settings} for name in CONDITIONS}
    pairs = {(str(setting.get("model")), str(setting.get("trace"))) for setting in settings}
    alike = len(pairs) == len(found["model"])
    return [name for name, values in found.items() if len(values) > 1 and not (name == "trace" and alike)]


def _label(varying: Sequence[str], key: Sequence[str]) -> str:
    words = [
        text
        if name == "model"
        else f"{digits(rate, 4)} requests/s"
        if name == "arrivals" and (rate := rate_of(text))
        else f"{name} {text}"
        for name, text in zip(varying, key, strict=True)
    ]
    return ", ".join(words)


def set_names(names: Sequence[str]) -> list[str]:
    """Return the settings that name a set of policies under any condition."""
    return [name for name in names if name not in CONDITIONS] or ["eviction"]


def _bounds(figure: Figure, foreseeing: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """Name the best configuration that knows the future, at each capacity where these vary."""
    if not foreseeing:
        return []
    conditions = by_condition(figure, foreseeing)
    if not conditions:
        return [f"{NOT_TESTED}{_named(figure, foreseeing, names)}"]
    return [f"{NOT_TESTED}{_sets(conditions, names)}, {_ends(figure, conditions)}"]


def _sets(conditions: Sequence[Condition], names: Sequence[str]) -> str:
    shown = sorted({name_of_set(condition.found.best, set_names(names)) for condition in conditions})
    return "; ".join(shown[:MOST_NAMED]) + (f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else "")


def _ends(figure: Figure, conditions: Sequence[Condition]) -> str:
    first, last = conditions[0], conditions[-1]
    return f"{figure.shown(first.found.value)} at {first.label} to {figure.shown(last.found.value)} at {last.label}"


def _at_each(figure: Figure, conditions: Sequence[Condition], names: Sequence[str]) -> tuple[list[str], list[Verdict]]:
    """Say where each set of policies wins and how significant its leads are."""
    contested = [condition for condition in conditions if condition.found.second is not None]
    if not contested:
        return [f"{figure.title}: {_ends(figure, conditions)} ({_sets(conditions, names)})"], []
    wins: dict[str, list[int]] = {}
    for at, each in enumerate(conditions):
        winners = [name_of_set(entry, set_names(names)) for entry in each.found.tied[:MOST_NAMED]]
        wins.setdefault(" = ".join(winners), []).append(at)
    order = sorted(wins, key=lambda name: (-len(wins[name]), wins[name][0]))
    labels = [condition.label for condition in conditions]
    winners = [f"{name} at {_places(wins[name], labels)}" for name in order[:MOST_NAMED]]
    more = sum(len(wins[name]) for name in order[MOST_NAMED:])
    winners += [f"other sets at {more} of {len(conditions)}"] if more else []
    few = [each.found for each in contested if _has_too_few(each.found)]
    varying = _conditions_of([condition.found.best.settings for condition in conditions])
    *others, last = (WORDS.get(name, name) for name in varying or ["capacity"])
    every = f"{', '.join(others)} and {last}" if others else last
    head = f"{figure.best} at each {every}, {_ends(figure, conditions)}"
    return [f"{head}: {'; '.join(winners)}", *_leads(figure, conditions, names)], few


def _places(won: Sequence[int], labels: Sequence[str]) -> str:
    """Write 7 of 10 (5% to 50%): neighbours by their ends, others by the first few."""
    shown = [labels[at] for at in won]
    if len(won) > 2 and list(won) == list(range(won[0], won[-1] + 1)):
        inside = f"{shown[0]} to {shown[-1]}"
    else:
        inside = ", ".join(shown[:MOST_PLACES]) + (", ..." if len(shown) > MOST_PLACES else "")
    return f"{len(won)} of {len(labels)} ({inside})"


def _leads(figure: Figure, conditions: Sequence[Condition], names: Sequence[str]) -> list[str]:
    """Describe the runner-up: its distance, the number of conditions with significance, and its policy set.

    Every condition is counted once, out of all: significant or not, counted by request, without an interval, a tie or
    without a second.
    """
    single = [condition for condition in conditions if len(condition.found.tied) == 1]
    known = [(condition, lead) for condition in single if (lead := condition.found.lead)]
    if not known:
        return []
    seconds = Counter[str]()
    for each, _ in known:
        assert each.found.second is not None
        apart = differing(each.found.best, each.found.second, names)
        seconds[name_of_set(each.found.second, [name for name in apart if name not in CONDITIONS])] += 1
    name, often = seconds.most_common(1)[0]
    relative = figure.name == "tokens_per_s"
    more = sorted(
        (lead.more / lead.below if relative and lead.below else lead.more, figure.more(lead.more, lead.below))
        for _, lead in known
    )
    if len(known) == 1:
        only, lead = known[0]
        return [f"  at {only.label} {more[0][1]} more than {name} (second; {certainty(only.found, lead)})"]
    labels = [condition.label for condition in conditions]
    usual = f"the second, most often {name} ({often} of {len(labels)})" if 2 * often >= len(known) else "the second"
    head = f"  {between(more[0][1], more[-1][1])} more than {f'{name} (second)' if often == len(known) else usual}"
    groups: dict[str, list[int]] = {}
    for at, each in enumerate(conditions):
        groups.setdefault(_how_sure(each.found), []).append(at)
    judged = [lead for _, lead in known if lead.certainty in (*TESTED, COUNTED)]
    if not judged:
        return [f"{head}; {NO_INTERVAL[known[0][1].certainty]}"]
    tested = any(lead.certainty in TESTED for lead in judged)
    sure = [f"{SIGNIFICANT} at {len(groups.pop(SIGNIFICANT, []))} of {len(labels)}"] if tested else []
    order = (INSIGNIFICANT, ON_ALL, ON_SOME, *NO_INTERVAL.values(), TIE, ALONE)
    ranks = {how: next(at for at, word in enumerate(order) if how.endswith(word)) for how in groups}
    others = [f"{how} at {_places(groups[how], labels)}" for how in sorted(groups, key=ranks.__getitem__)]
    by = f"{'95% CI, ' if tested else ''}n = {_n(min(lead.requests for lead in judged))}"
    return [f"{head}: {'; '.join([*sure, *others])} ({by})"]


#: How sure the first place under a condition is; all other words are reasons for a missing interval.
SIGNIFICANT, INSIGNIFICANT, TIE, ALONE = "significant", "not significant", "a tie", "no second"
ON_ALL, ON_SOME = "on every request", "on some requests"
TESTED = (SURE, LUCK, NOISE)


def _how_sure(found: Verdict) -> str:
    lead = found.lead
    if len(found.tied) > 1 or lead is None:
        return TIE if len(found.tied) > 1 else ALONE
    if lead.counted is not None:
        more, all_of_them = found.figure.more_is, lead.counted.above == lead.counted.requests
        return f"{more} {ON_ALL if all_of_them else ON_SOME}"
    return SIGNIFICANT if lead.certainty == SURE else NO_INTERVAL.get(lead.certainty, INSIGNIFICANT)


# The best of all


def _best(figure: Figure, known: Sequence[Entry], names: Sequence[str]) -> Paragraph:
    """Name the winner with its figure, its lead over the second, and those that are statistically tied with it."""
    if not known:
        return Paragraph(figure, [])
    head = f"{figure.best}: {_named(figure, known, names)}"
    found = None if len(tied_first(figure, known)) > 1 else verdict(figure, known)
    if found is None:
        return Paragraph(figure, [head])
    lead, compared = found.lead, ""
    if lead is not None and found.second is not None:
        other = name_of_set(found.second, differing(found.best, found.second, names))
        compared = f", {figure.more(lead.more, lead.below)} more than {other} (second; {certainty(found, lead)})"
    few = [found] * _has_too_few(found)
    return Paragraph(figure, [f"{head}{_range(found)}{compared}", *_as_good(found, names)], few, lead)


def _named(figure: Figure, known: Sequence[Entry], names: Sequence[str]) -> str:
    tied, value = tied_first(figure, known), figure.shown(getattr(known[0], figure.name))
    if len(tied) > 1:
        return f"a tie of {listed(tied, names)}, {value} each"
    return f"{name_of_set(known[0], names)}, {value}"


def _range(found: Verdict) -> str:
    """Return the interval of the winner's own figure, if there is one."""
    own, figure = found.own(), found.figure
    if own is None or own.low is None or own.high is None:
        return f" (no interval: {own.why})" if own and own.why not in ("", TOO_FEW, SHARE_PASSES) else ""
    return f" ({figure.end(own.low)} to {figure.end(own.high)})"


def certainty(found: Verdict, lead: Lead) -> str:
    """Return the interval of a lead, the reason why it has none, or the number of requests on which it holds."""
    if lead.counted is not None:
        return _counted_out(found.figure, lead)
    if lead.certainty in NO_INTERVAL:
        return NO_INTERVAL[lead.certainty]
    many = f"{len(found.rivals) + 1:,} configurations"
    said = {
        SURE: SIGNIFICANT if lead.contradicts or lead.off is None else "",
        LUCK: f"{INSIGNIFICANT} after correcting for {many}",
        NOISE: INSIGNIFICANT,
    }[lead.certainty]
    if lead.off is None:
        return f"{said} (p = {lead.p:.2g}), n = {_n(lead.requests)}"
    chance = f" (p = {lead.p:.2g})" if lead.contradicts else ""
    wide = f"95% CI ±{found.figure.more(lead.off, lead.below)}"
    return f"{said}{chance}{': ' if said else ''}{wide}, n = {_n(lead.requests)}"


def _counted_out(figure: Figure, lead: Lead) -> str:
    """Write: faster on 6 of 6 requests, by 12% to 31%."""
    assert lead.certainty == COUNTED and lead.counted is not None
    found = lead.counted
    shares = figure.name == "tokens_per_s" and found.least_share is not None and found.most_share is not None
    ends = [percent(found.least_share or 0), percent(found.most_share or 0)] if shares else []
    ends = ends or [points(found.least), points(found.most)]
    return f"{figure.more_is} on {found.above:,} of {_n(found.requests)}, by {between(*ends)}"


def _n(requests: int) -> str:
    return counted(requests, "request")


def _as_good(found: Verdict, names: Sequence[str]) -> list[str]:
    alike, many = found.as_good, len(found.rivals)
    if not alike or many < 2:
        return []
    return [f"  statistically tied with {len(alike):,} of {many:,} others: {listed(alike, names)}"]


# What limits a verdict


def _has_too_few(found: Verdict) -> bool:
    """Return whether a comparison is undecided that needs more requests to be decided."""
    undecided = any(each.beside.answer != YES for each in found.tested)
    return undecided and 2 <= found.samples < enough(pairs_of(len(found.tested) + 1))


def _too_few(found: Sequence[Verdict]) -> list[str]:
    """State how many requests are needed to decide among the configurations."""
    if not found:
        return []
    most = max(found, key=lambda each: len(each.tested))
    many, decided = len(most.tested) + 1, any(rival.beside.answer == YES for each in found for rival in each.tested)
    pairs = pairs_of(many)
    pair = "" if many == 2 else ", or name one comparison: `moereplay sweep compare`"
    return [
        f"  {most.samples} requests cannot separate {'all ' if decided else ''}{many} configurations "
        f"({counted(pairs, 'pair')}): record {enough(pairs)} or more{pair}"
    ]


def _caution(entries: Sequence[Entry], body: Sequence[str]) -> list[str]:
    """State the assumptions of the intervals, if there are any."""
    stated = any("95% CI" in line for line in body)
    return [f"  {assumed([entry.settings for entry in entries])}"] if stated else []


def assumed(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return what intervals of results under these settings assume."""
    return f"95% CI: assumes independent requests{'' if all(map(independent, settings)) else '; these share a cache'}"
