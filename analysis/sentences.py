"""The lines under a table of replays: which set of policies is best, by how much, and how sure that is.

Where capacities, traces or schedules vary, the best set of each is named, as more memory always wins. What knows the
future is an upper bound. The page of `report` takes its words on certainty from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moereplay.analysis.comparisons import YES, enough, pairs_of
from moereplay.analysis.statistics import FEW
from moereplay.analysis.tables import counted
from moereplay.analysis.verdict import (
    COUNTED,
    FIGURES,
    GENERATED,
    GIVEN,
    LUCK,
    NO_ROWS,
    NOISE,
    ONE_REQUEST,
    SHARED,
    SURE,
    UNKNOWN,
    Entry,
    Figure,
    Lead,
    Verdict,
    called,
    differing,
    independent,
    listed,
    ranked,
    tied_first,
    verdict,
)
from moereplay.traces.texts import percent, points

BOUND = "upper bound"
NO_TPOT = (
    "no TPOT, no tokens/s where no pass decodes, as of text recorded in one pass:",
    "  --passes decode:N takes the tokens from position N on as decoded, one per pass",
)
NO_TIME = (
    "no tokens/s where decode passes take no time: they demand no expert, and dense layers take none;",
    "  `moereplay inspect` shows which tokens are not routed, --model gives dense layers their time",
)
#: Why there is no interval.
UNTOLD = {
    NO_ROWS: "no confidence interval: per-request rows were not stored (set `requests = true`)",
    ONE_REQUEST: "no confidence interval: one request",
    SHARED: "no confidence interval: requests share passes",
    UNKNOWN: "no confidence interval",
    GENERATED: "no confidence interval: the routing is synthetic",
}
WORDS = {"passes": "schedule of passes"}
MOST_NAMED = 3  #: sets that win at some capacity, and capacities of one


def lines(entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """The winner by each figure, where there are several, and what to type where there is no TPOT.

    `names` are the settings by which configurations are called.
    """
    parts = [_judged(figure, entries, names) for figure in FIGURES] if len(entries) > 1 else []
    said = [line for part in parts for line in part.lines]
    few = _too_few([each for part in parts for each in part.few])
    return [*untimed(entries), *said, *few, *_unlike(parts), *_caution(entries, said)]


def untimed(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Why entries have no tokens/s, in lines; nothing if all have."""
    tpots = [entry.settings.get("tpot_ms") for entry in entries if entry.tokens_per_s is None]
    return (NO_TPOT if None in tpots else ()) + (NO_TIME if 0 in tpots else ())


class Said(NamedTuple):
    """What is said of one figure."""

    figure: Figure
    lines: Sequence[str]
    few: Sequence[Verdict] = ()  #: those for which requests are too few
    lead: Lead | None = None  #: of the only winner


def _unlike(parts: Sequence[Said]) -> list[str]:
    """That the lead is sure in one figure and not in another."""
    leads = {part.figure.called: part.lead for part in parts if part.lead and part.lead.certainty not in UNTOLD}
    sure = {name: _is_sure(lead) for name, lead in leads.items()}
    if len(set(sure.values())) < 2:
        return []
    words = [f"{'sure' if is_sure else 'not sure'} in {name}" for name, is_sure in sure.items()]
    return [f"  {'; '.join(words)} ({_n(min(lead.requests for lead in leads.values()))})"]


class Given(NamedTuple):
    """A capacity of a trace and schedule, and the best set of policies there."""

    label: str  #: as the user typed it
    found: Verdict


def each_given(figure: Figure, entries: Sequence[Entry]) -> list[Given]:
    """The verdict at each capacity, trace and schedule, smallest capacity first; none where these do not vary.

    Entries without the figure are left out.
    """
    known = [entry for entry in entries if getattr(entry, figure.name) is not None]
    varying = [name for name in GIVEN if len({str(entry.settings.get(name)) for entry in known}) > 1]
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in sorted(known, key=_order):
        groups.setdefault(tuple(_short(name, entry) for name in varying), []).append(entry)
    if len(groups) < 2:
        return []
    labels = {key: key[0] if varying == ["capacity"] else _label(varying, key) for key in groups}
    found = ((labels[key], verdict(figure, group)) for key, group in groups.items())
    return [Given(label, each) for label, each in found if each is not None]


def _order(entry: Entry) -> tuple[str, float]:
    return (str(entry.settings.get("trace")), float(entry.settings.get("capacity_bytes") or 0))


def _short(name: str, entry: Entry) -> str:
    value = str(entry.settings.get(name))
    return value[:8] if name == "trace" else value


def _label(varying: Sequence[str], key: Sequence[str]) -> str:
    words = zip(varying, key, strict=True)
    return ", ".join(text if name in ("model", "capacity") else f"{name} {text}" for name, text in words)


def _judged(figure: Figure, entries: Sequence[Entry], names: Sequence[str]) -> Said:
    """The best that can be used, and the upper bound; no line where nothing has the figure."""
    usable, foreseeing = (
        ranked(figure, [entry for entry in entries if entry.foresees is foresees]) for foresees in (False, True)
    )
    bounds = bounds_of(figure, foreseeing, names)
    if given := each_given(figure, usable):
        said, few = of_each(figure, given, names)
        return Said(figure, [*said, *bounds], few)
    if not usable and foreseeing:
        return Said(figure, [f"{BOUND}, {figure.called}: {bounds[0].partition(': ')[2]}"])
    best = _best(figure, usable, names)
    return best._replace(lines=[*best.lines, *bounds])


def bounds_of(figure: Figure, foreseeing: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """What knows the future, at each capacity where these vary; it is not tested."""
    if not foreseeing:
        return []
    given = each_given(figure, foreseeing)
    if not given:
        return [f"  {BOUND} (knows the future, not tested): {_named(figure, foreseeing, names)}"]
    sets = {_set(each.found.best, names) for each in given}
    return [f"  {BOUND} (knows the future, not tested): {_named_sets(sets)}, {_ends(figure, given)}"]


def _named_sets(sets: set[str]) -> str:
    shown = sorted(sets)
    return "; ".join(shown[:MOST_NAMED]) + (f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else "")


def _ends(figure: Figure, given: Sequence[Given]) -> str:
    first, last = given[0], given[-1]
    return f"{figure.shown(first.found.value)} at {first.label} to {figure.shown(last.found.value)} at {last.label}"


def _set(entry: Entry, names: Sequence[str]) -> str:
    """What a configuration is called whatever it was given."""
    return called(entry, [name for name in names if name not in GIVEN] or ["eviction"])


def of_each(figure: Figure, given: Sequence[Given], names: Sequence[str]) -> tuple[list[str], list[Verdict]]:
    """How often each set of policies wins, and how sure that is."""
    contested = [each for each in given if each.found.second is not None]
    if not contested:
        sets = {_set(each.found.best, names) for each in given}
        return [f"{figure.called}: {_ends(figure, given)} ({_named_sets(sets)})"], []
    wins: dict[str, list[int]] = {}
    for at, each in enumerate(given):
        wins.setdefault(" = ".join(_set(entry, names) for entry in each.found.tied[:MOST_NAMED]), []).append(at)
    order = sorted(wins, key=lambda name: (-len(wins[name]), wins[name][0]))
    labels = [each.label for each in given]
    said = [f"{name} at {_places(wins[name], labels)}" for name in order[:MOST_NAMED]]
    more = sum(len(wins[name]) for name in order[MOST_NAMED:])
    said += [f"other sets at {more} of {len(given)}"] if more else []
    where = _varying(given)
    few = [each.found for each in contested if has_too_few(each.found)]
    head = f"{figure.best} at each {where}, {_ends(figure, given)}"
    return [f"{head}: {'; '.join(said)}", *_leads(figure, contested, names)], few


def _varying(given: Sequence[Given]) -> str:
    """What the labels are of, in words."""
    first = [{name: each.found.best.settings.get(name) for name in GIVEN} for each in given]
    return (
        " and ".join(WORDS.get(name, name) for name in GIVEN if len({str(each[name]) for each in first}) > 1)
        or "capacity"
    )


def _places(won: Sequence[int], labels: Sequence[str]) -> str:
    """7 of 10 (5% to 50%): a run of neighbours by its ends, and the first of many others."""
    shown = [labels[at] for at in won]
    if len(won) > 2 and list(won) == list(range(won[0], won[-1] + 1)):
        inside = f"{shown[0]} to {shown[-1]}"
    else:
        inside = ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
    return f"{len(won)} of {len(labels)} ({inside})"


def _leads(figure: Figure, contested: Sequence[Given], names: Sequence[str]) -> list[str]:
    """By how much the second is behind, how often that is significant, and which is second."""
    leads = [(each, each.found.lead) for each in contested if each.found.lead and len(each.found.tied) == 1]
    known = [(each, lead) for each, lead in leads if lead is not None]
    if not known:
        return []
    seconds = Counter(_second(each.found, names) for each, _ in known)
    name, often = seconds.most_common(1)[0]
    more = sorted((_share(figure, lead), figure.more(lead.more, lead.below)) for _, lead in known)
    apart = more[0][1] if len(known) == 1 else f"{more[0][1]} to {more[-1][1]}"
    sure = [each for each, lead in known if _is_sure(lead)]
    noise = [each for each, lead in known if lead.certainty in (LUCK, NOISE)]
    usual = f", most often {name} ({often} of {len(known)})" if 2 * often >= len(known) else ""
    said = f"  {apart} more than the second{usual}"
    if len(known) == 1:
        only, lead = known[0]
        return [f"  at {only.label} {apart} more than {name} (second; {certainty(only.found, lead)})"]
    if not sure and not noise:
        return [f"{said}; {UNTOLD.get(known[0][1].certainty, UNTOLD[UNKNOWN])}"]
    tied = f"; not significant at {_places_of(noise, contested)}" if noise else ""
    requests = min(lead.requests for _, lead in known)
    return [f"{said}: significant at {len(sure)} of {len(known)}{tied} (95% CI, n = {_n(requests)})"]


def _places_of(those: Sequence[Given], all_of: Sequence[Given]) -> str:
    labels = [each.label for each in all_of]
    return _places([labels.index(each.label) for each in those], labels)


def _share(figure: Figure, lead: Lead) -> float:
    return lead.more / lead.below if figure.name == "tokens_per_s" and lead.below else lead.more


def _second(found: Verdict, names: Sequence[str]) -> str:
    assert found.second is not None
    return called(found.second, [name for name in differing(found.best, found.second, names) if name not in GIVEN])


def _is_sure(lead: Lead) -> bool:
    if lead.counted is not None:
        return lead.counted.above == lead.counted.requests
    return lead.certainty == SURE


def _best(figure: Figure, known: Sequence[Entry], names: Sequence[str]) -> Said:
    """The winner with its figure, beside the second, and the others that may be as good."""
    if not known:
        return Said(figure, [])
    said = f"{figure.best}: {_named(figure, known, names)}"
    found = None if len(tied_first(figure, known)) > 1 else verdict(figure, known)
    if found is None:
        return Said(figure, [said])
    lead = found.lead
    beside = "" if lead is None else _compared(found, lead, names)
    return Said(figure, [f"{said}{_range(found)}{beside}", *_as_good(found, names)], [found] * has_too_few(found), lead)


def _named(figure: Figure, known: Sequence[Entry], names: Sequence[str]) -> str:
    """The best of these, or all that tie."""
    tied, value = tied_first(figure, known), figure.shown(getattr(known[0], figure.name))
    if len(tied) > 1:
        return f"a tie of {listed(tied, names)}, {value} each"
    return f"{called(known[0], names)}, {value}"


def _range(found: Verdict) -> str:
    """Where the winner's own figure lies; nothing of few requests."""
    own, figure = found.own(), found.figure
    if own is None or own.low is None or own.high is None or own.requests < FEW:
        return ""
    return f" ({figure.end(own.low)} to {figure.end(own.high)})"


def _compared(found: Verdict, lead: Lead, names: Sequence[str]) -> str:
    assert found.second is not None
    other = called(found.second, differing(found.best, found.second, names))
    return f", {found.figure.more(lead.more, lead.below)} more than {other} (second; {certainty(found, lead)})"


def certainty(found: Verdict, lead: Lead) -> str:
    """How sure a lead is, in words: its interval, why it has none, or on how many requests it holds."""
    if lead.counted is not None:
        return counted_out(found.figure, lead)
    if lead.off is None or lead.certainty in UNTOLD:
        return UNTOLD[lead.certainty]
    many = f"{len(found.rivals) + 1:,} configurations"
    luck = {SURE: "", LUCK: f"not significant after correcting for {many}: ", NOISE: "not significant: "}
    wide = f"95% CI ±{found.figure.more(lead.off, lead.below)}"
    return f"{luck[lead.certainty]}{wide}, n = {_n(lead.requests)}"


def counted_out(figure: Figure, lead: Lead) -> str:
    """On how many requests the best is better, and by how much: faster on 6 of 6 requests, by 12% to 31%."""
    assert lead.certainty == COUNTED and lead.counted is not None
    found = lead.counted
    shares = figure.name == "tokens_per_s" and found.least_share is not None and found.most_share is not None
    ends = [percent(found.least_share or 0), percent(found.most_share or 0)] if shares else []
    ends = ends or [points(found.least), points(found.most)]
    apart = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
    return f"{figure.more_is} on {found.above:,} of {counted(found.requests, 'request')}, by {apart}"


def _n(requests: int) -> str:
    return counted(requests, "request")


def _as_good(found: Verdict, names: Sequence[str]) -> list[str]:
    """How many of several others the winner does not surely beat, and the best of those."""
    alike, many = found.as_good, len(found.rivals)
    if not alike or many < 2:
        return []
    return [f"  statistically tied with {len(alike):,} of {many:,} others: {listed(alike, names)}"]


def has_too_few(found: Verdict) -> bool:
    """Whether something is undecided that so few requests can hardly decide."""
    undecided = any(each.beside.answer != YES for each in found.tested)
    return undecided and 2 <= found.samples < enough(pairs_of(len(found.tested) + 1))


def _too_few(found: Sequence[Verdict]) -> list[str]:
    """That so few requests cannot decide among so many configurations, and how many could."""
    if not found:
        return []
    most = max(found, key=lambda each: len(each.tested))
    many, decided = len(most.tested) + 1, any(rival.beside.answer == YES for each in found for rival in each.tested)
    pairs = pairs_of(many)
    pair = "" if many == 2 else ", or name one comparison: `moereplay sweep compare`"
    return [
        f"  {most.samples} requests {'decide little' if decided else 'cannot decide'} among {many} configurations "
        f"({counted(pairs, 'pair')}): record {enough(pairs)} or more{pair}"
    ]


def _caution(entries: Sequence[Entry], said: Sequence[str]) -> list[str]:
    """What intervals rest on, where there are any."""
    if not any("95% CI" in line for line in said):
        return []
    few = any(0 < len(entry.requests()) < FEW for entry in entries)
    shared = not all(independent(entry) for entry in entries)
    words = ["; these share a cache"] * shared + ["; fewer than ten requests: rough"] * few
    return [f"  95% CI: if requests are independent{''.join(words)}"]
