"""The last lines of a table of replays: which is fastest, which hits most, and whether the difference means anything.

What knows the future cannot be used, and is no winner: a line of its own says how far the best of them gets.

Requests are the samples. They share a cache, so that they are not quite independent; the interval is a guide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from analysis.statistics import Pairs, uncertainty
from analysis.tables import cell

#: What two configurations have alike when one of them is called the second: policies are compared, not machines.
ALIKE = ("model", "trace", "passes", "platform", "capacity")
SHOWN_TIED = 3
WITH_FUTURE = "with knowledge of the future"
NO_TPOT = (
    "no TPOT, no tokens/s where no pass decodes, as of text recorded in one pass:",
    "  --passes decode:N takes the tokens from position N on as decoded, one per pass",
)


class Entry(NamedTuple):
    """One configuration with what it is judged by."""

    settings: Mapping[str, Any]  #: what it is called by, and `ALIKE`
    tokens_per_s: float | None
    hit_rate: float | None
    requests: Callable[[], Sequence[Mapping[str, Any]]]  #: its rows of requests; none where they are not kept
    foresees: bool = False  #: whether a policy of it knows the future


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


@dataclass(frozen=True)
class _Figure:
    """What the best is chosen by."""

    best: str
    name: str  #: of the field of `Entry`
    shown: Callable[[float], str]
    more: Callable[[float, float], str]  #: a difference beside the second's value
    parts: tuple[str, str, float]  #: counters of a request that are divided, and the factor of the quotient


FIGURES = (
    _Figure(
        "fastest",
        "tokens_per_s",
        lambda value: f"{cell(value)} tokens/s",
        lambda more, second: f"{_two_digits(100 * more / second)}%" if second else cell(more),
        ("decode_passes", "decode_ns", 1e9),
    ),
    _Figure(
        "most hits",
        "hit_rate",
        lambda value: f"{100 * value:.2f}%",
        lambda more, _: f"{_two_digits(100 * more)} points",
        ("hits", "accesses", 1.0),
    ),
)


def lines(entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """The winner by each figure, where there are several; and what to type where there is no TPOT.

    `names` are the settings by which configurations are called.
    """
    said = [line for figure in FIGURES for line in _judged(figure, entries, names)] if len(entries) > 1 else []
    missing = any(entry.tokens_per_s is None for entry in entries)
    return [*(NO_TPOT if missing else ()), *said]


def _judged(figure: _Figure, entries: Sequence[Entry], names: Sequence[str]) -> list[str]:
    """The best that can be used, and the best that knows the future; none where nothing has the figure."""
    usable, foreseeing = (
        [entry for entry in entries if entry.foresees is foresees and getattr(entry, figure.name) is not None]
        for foresees in (False, True)
    )
    said = [f"{figure.best}: {_best(figure, usable, names)}"] if usable else []
    if not foreseeing:
        return said
    words = WITH_FUTURE if usable else f"{figure.best}, {WITH_FUTURE}"
    return [*said, f"{'  ' if usable else ''}{words}: {_best(figure, foreseeing, names, alone=not usable)}"]


def _best(figure: _Figure, known: Sequence[Entry], names: Sequence[str], alone: bool = True) -> str:
    """The winner of these with its figure, beside the second where these are judged alone."""
    known = sorted(known, key=lambda entry: -getattr(entry, figure.name))  # stable: the order of the table among equals
    first, value = known[0], getattr(known[0], figure.name)
    tied = [entry for entry in known if getattr(entry, figure.name) == value]
    if len(tied) > 1:
        return f"a tie of {_listed(tied, names)}, {figure.shown(value)} each"
    said = f"{_called(first, names)}, {figure.shown(value)}"
    second = _second(first, known) if alone else None
    return f"{said}{_compared(figure, first, second, names)}" if second else said


def _second(first: Entry, known: Sequence[Entry]) -> Entry | None:
    """The next best of the same machine and capacity, or else of the same passes, or of the same trace."""
    for alike in (ALIKE, ALIKE[:3], ALIKE[:2]):
        ours = [first.settings.get(name) for name in alike]
        for entry in known[1:]:
            if [entry.settings.get(name) for name in alike] == ours:
                return entry
    return None


def _compared(figure: _Figure, first: Entry, second: Entry, names: Sequence[str]) -> str:
    value, below = getattr(first, figure.name), getattr(second, figure.name)
    more = value - below
    apart = [name for name in names if first.settings.get(name) != second.settings.get(name)]
    said = f", {figure.more(more, below)} more than {_called(second, apart)} (second)"
    pairs = _paired(figure, first, second)
    if not pairs:
        return f"{said}; no telling how sure: `requests = true` keeps requests"
    count = len(pairs[0])
    if count == 1:
        return f"{said}; one request, so no telling how sure"
    off = uncertainty(*pairs)
    if off is None:
        return f"{said}; no telling how sure"
    off *= figure.parts[2]
    wide = figure.more(off, below)
    if off < more:
        return f"{said}, ± {wide} over {count} requests"
    return f"{said}, which means nothing: ± {wide} over {count} requests"


def _paired(figure: _Figure, first: Entry, second: Entry) -> tuple[Pairs, Pairs] | None:
    """Both parts of the figure of every request that has it in either; None where requests are unknown."""
    over, under, _ = figure.parts
    ours, theirs = ({row["request"]: row for row in entry.requests()} for entry in (first, second))
    shared = [name for name in ours if name in theirs and (ours[name][under] or theirs[name][under])]
    if not shared:
        return None
    left, right = ([(rows[name][over] or 0, rows[name][under] or 0) for name in shared] for rows in (ours, theirs))
    return left, right


def _listed(tied: Sequence[Entry], names: Sequence[str]) -> str:
    shown = [_called(entry, names) for entry in tied[:SHOWN_TIED]]
    if len(tied) > SHOWN_TIED:
        return f"{'; '.join(shown)} and {len(tied) - SHOWN_TIED:,} more"
    return f"{'; '.join(shown[:-1])} and {shown[-1]}"


def _called(entry: Entry, names: Sequence[str]) -> str:
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
