"""The last lines of a table of replays: which is fastest, which hits most, and what the difference means.

What knows the future cannot be used, and is no winner: a line of its own says how far the best of them gets.

Requests are the samples (docs/statistics.md): the winner is compared with every other configuration over the same
trace, corrected for their number, and those that it does not surely beat are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from analysis.bootstrap import FEW, Interval
from analysis.comparisons import NOTHING, YES, Comparison, against, estimate
from analysis.tables import cell

#: What two configurations have alike when one of them is called the second: policies are compared, not machines.
ALIKE = ("model", "trace", "passes", "platform", "capacity")
SHOWN_TIED = 3
WITH_FUTURE = "with knowledge of the future"
NO_TPOT = (
    "no TPOT, no tokens/s where no pass decodes, as of text recorded in one pass:",
    "  --passes decode:N takes the tokens from position N on as decoded, one per pass",
)
NO_TIME = (
    "no tokens/s where decode passes take no time: they demand no expert, and dense layers take none;",
    "  `moereplay inspect` shows which tokens are not routed, --model gives dense layers their time",
)


class Entry(NamedTuple):
    """One configuration with what it is judged by."""

    settings: Mapping[str, Any]  #: what it is called by, and `ALIKE`
    tokens_per_s: float | None
    hit_rate: float | None
    requests: Callable[[], Sequence[Mapping[str, Any]]]  #: its rows of requests; none where they are not kept
    foresees: bool = False  #: whether a policy of it knows the future
    synthetic: bool = False  #: whether its routing is, so that `requests` has no rows


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


@dataclass(frozen=True)
class Figure:
    """What the best is chosen by."""

    best: str
    name: str  #: of the field of `Entry`
    shown: Callable[[float], str]
    end: Callable[[float], str]  #: an end of an interval
    more: Callable[[float, float], str]  #: a difference beside the second's value


FIGURES = (
    Figure(
        "fastest",
        "tokens_per_s",
        lambda value: f"{cell(value)} tokens/s",
        cell,
        lambda more, second: f"{_two_digits(100 * more / second)}%" if second else cell(more),
    ),
    Figure(
        "most hits",
        "hit_rate",
        lambda value: f"{100 * value:.2f}%",
        lambda value: f"{100 * min(value, 1):.2f}",
        lambda more, _: f"{_two_digits(100 * more)} points",
    ),
)


#: What is known of a lead: nothing, for want of rows or of a second request or for another reason; or how sure it is.
NO_ROWS, ONE_REQUEST, UNKNOWN, SURE, LUCK, NOISE = "no rows", "one request", "unknown", "sure", "luck", "noise"
GENERATED = "generated"  #: the routing is synthetic: nothing is known of a lead on a real trace


class Lead(NamedTuple):
    """The best beside the second."""

    more: float  #: the best's figure less the second's
    below: float  #: the second's
    off: float | None  #: half the 95 % interval of the difference, where it is known
    requests: int
    certainty: str


class Rival(NamedTuple):
    """Another configuration, and the winner beside it."""

    entry: Entry
    beside: Comparison


class Verdict(NamedTuple):
    """The best of some configurations by one figure."""

    figure: Figure
    tied: Sequence[Entry]  #: the best, and all that have exactly its figure
    rivals: Sequence[Rival]  #: the others that replay the same requests, best first
    second: Entry | None  #: the next best that it can be set beside

    @property
    def best(self) -> Entry:
        """The first of those that tie."""
        return self.tied[0]

    @property
    def value(self) -> float:
        """The best's figure."""
        return getattr(self.best, self.figure.name)

    @property
    def lead(self) -> Lead | None:
        """None where there is no second."""
        if self.second is None:
            return None
        beside = next((each.beside for each in self.rivals if each.entry is self.second), NOTHING)
        below = getattr(self.second, self.figure.name)
        more = self.value - below
        certainty = GENERATED if self.best.synthetic else _certainty(beside, more)
        return Lead(more, below, beside.off, beside.requests, certainty)

    @property
    def as_good(self) -> list[Entry]:
        """The rivals that the best does not surely beat."""
        return [each.entry for each in self.rivals if each.beside.answer != YES and each.beside.off is not None]

    def own(self) -> Interval | None:
        """The interval of the best's own figure; None where no request has it."""
        return estimate(self.best.requests(), self.figure.name)


def _certainty(beside: Comparison, more: float) -> str:
    if beside.requests < 2:
        return ONE_REQUEST if beside.requests else NO_ROWS
    if beside.off is None:
        return UNKNOWN
    if beside.answer == YES:
        return SURE
    return LUCK if beside.off < more else NOISE


def verdict(figure: Figure, entries: Sequence[Entry]) -> Verdict | None:
    """The best of these configurations beside the others; None where none has the figure."""
    known = _ranked(figure, entries)
    if not known:
        return None
    tied = _tied(figure, known)
    return Verdict(figure, tied, _rivals(figure, known[0], known), _second(known[0], known))


def _ranked(figure: Figure, entries: Sequence[Entry]) -> list[Entry]:
    """Those that have the figure, best first; the order that they came in among equals."""
    known = [entry for entry in entries if getattr(entry, figure.name) is not None]
    return sorted(known, key=lambda entry: -getattr(entry, figure.name))


def lines(entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """The winner by each figure, where there are several, and what to type where there is no TPOT.

    `names` are the settings by which configurations are called.
    """
    said = [line for figure in FIGURES for line in _judged(figure, entries, names)] if len(entries) > 1 else []
    return [*untimed(entries), *said, *_caution(entries, said)]


def untimed(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Why entries have no tokens/s, in lines; nothing if all have."""
    tpots = [entry.settings.get("tpot_ms") for entry in entries if entry.tokens_per_s is None]
    return (NO_TPOT if None in tpots else ()) + (NO_TIME if 0 in tpots else ())


def _judged(figure: Figure, entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """The best that can be used, and the best that knows the future; none where nothing has the figure."""
    usable, foreseeing = (
        _ranked(figure, [entry for entry in entries if entry.foresees is foresees]) for foresees in (False, True)
    )
    said = _best(figure, figure.best, usable, names)
    if not foreseeing:
        return said
    if not usable:
        return _best(figure, f"{figure.best}, {WITH_FUTURE}", foreseeing, names)
    return [*said, f"  {WITH_FUTURE}: {_named(figure, foreseeing, names)}"]


def _best(figure: Figure, title: str, known: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """The winner with its figure, beside the second, and the others that may be as good."""
    if not known:
        return []
    said = f"{title}: {_named(figure, known, names)}"
    found = None if len(_tied(figure, known)) > 1 else verdict(figure, known)
    if found is None:
        return [said]
    beside = "" if found.lead is None else _compared(found, found.lead, names)
    return [f"{said}{_range(found)}{beside}", *_as_good(found, names)]


def _named(figure: Figure, known: Sequence[Entry], names: Sequence[str]) -> str:
    """The best of these, or all that tie."""
    tied, value = _tied(figure, known), figure.shown(getattr(known[0], figure.name))
    if len(tied) > 1:
        return f"a tie of {listed(tied, names)}, {value} each"
    return f"{called(known[0], names)}, {value}"


def _tied(figure: Figure, known: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in known if getattr(entry, figure.name) == getattr(known[0], figure.name)]


def _rivals(figure: Figure, first: Entry, known: Sequence[Entry]) -> list[Rival]:
    """The others that replay the same requests."""
    ours = [first.settings.get(name) for name in ALIKE[:2]]
    others = [each for each in known[1:] if [each.settings.get(name) for name in ALIKE[:2]] == ours]
    found = against(first.requests(), [each.requests() for each in others], figure.name, picked=True)
    return [Rival(*pair) for pair in zip(others, found, strict=True)]


def _range(found: Verdict) -> str:
    """Where the winner's own figure lies; nothing of few requests."""
    own, figure = found.own(), found.figure
    if own is None or own.low is None or own.high is None or own.requests < FEW:
        return ""
    return f" ({figure.end(own.low)} to {figure.end(own.high)})"


def _as_good(found: Verdict, names: Sequence[str]) -> list[str]:
    """How many of several others the winner does not surely beat, and the best of those."""
    alike, many = found.as_good, len(found.rivals)
    if not alike or many < 2:
        return []
    return [f"  can't tell it from {len(alike):,} of {many:,} others: {listed(alike, names)}"]


def _caution(entries: Sequence[Entry], said: Sequence[str]) -> list[str]:
    """What intervals rest on, where there are any."""
    if not any("±" in line for line in said):
        return []
    few = any(0 < len(entry.requests()) < FEW for entry in entries)
    shared = not all(independent(entry) for entry in entries)
    words = ["; these share a cache"] * shared + ["; fewer than ten requests: rough"] * few
    return [f"  ±: 95%, if requests are independent{''.join(words)}"]


def independent(entry: Entry) -> bool:
    """Whether every request begins with an empty cache, and has it to itself."""
    return entry.settings.get("reset") == "request" and not str(entry.settings.get("passes")).startswith("batch")


def _second(first: Entry, known: Sequence[Entry]) -> Entry | None:
    """The next best of the same machine and capacity, or else of the same passes, or of the same trace."""
    for alike in (ALIKE, ALIKE[:3], ALIKE[:2]):
        ours = [first.settings.get(name) for name in alike]
        for entry in known[1:]:
            if [entry.settings.get(name) for name in alike] == ours:
                return entry
    return None


def _compared(found: Verdict, lead: Lead, names: Sequence[str]) -> str:
    assert found.second is not None
    figure, other = found.figure, called(found.second, differing(found.best, found.second, names))
    said = f", {figure.more(lead.more, lead.below)} more than {other} (second)"
    if lead.off is None or lead.certainty in UNTOLD:
        return f"{said}; {UNTOLD[lead.certainty]}"
    luck = {SURE: "", LUCK: f"which may be luck among {len(found.rivals) + 1:,}: ", NOISE: "which means nothing: "}
    wide = f"± {figure.more(lead.off, lead.below)} over {lead.requests:,} requests"
    return f"{said}, {luck[lead.certainty]}{wide}"


#: Why nothing is known of a lead.
UNTOLD = {
    NO_ROWS: "no telling how sure: `requests = true` keeps requests",
    ONE_REQUEST: "one request, so no telling how sure",
    UNKNOWN: "no telling how sure",
    GENERATED: "no interval, as the routing is synthetic",
}


def differing(first: Entry, second: Entry, names: Sequence[str]) -> list[str]:
    """The settings that the two do not share."""
    return [name for name in names if first.settings.get(name) != second.settings.get(name)]


def listed(tied: Sequence[Entry], names: Sequence[str]) -> str:
    """The first of these, and how many more they are."""
    shown = [called(entry, names) for entry in tied[:SHOWN_TIED]]
    if len(tied) == 1:
        return shown[0]
    if len(tied) > SHOWN_TIED:
        return f"{'; '.join(shown)} and {len(tied) - SHOWN_TIED:,} more"
    return f"{'; '.join(shown[:-1])} and {shown[-1]}"


def called(entry: Entry, names: Sequence[str]) -> str:
    """Policies by their names, other settings as `name value`, the capacity last: least_stale, scope global at 50%."""
    plain = ("preset", "eviction", "prefetch", "miss", "routing")
    words = [
        str(entry.settings[name]) if name in plain else f"{name} {entry.settings[name]}"
        for name in names
        if name != "capacity"
    ]
    if "capacity" not in names:
        return ", ".join(words)
    return f"{', '.join(words) or 'capacity'} {'at ' if words else ''}{entry.settings['capacity']}"
