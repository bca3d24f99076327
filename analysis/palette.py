"""Colours and markers: one pair per eviction policy, the same in every figure of every run.

Common policies have the colour-blind-safe set of Okabe and Ito (2008), the rest Paul Tol's muted set and darker shades
of both. Markers distinguish lines in a poor print. Variants of a policy (`least_stale:order=a`) keep its hue and marker
and change dash and shade.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

#: Causes of a miss.
COMPULSORY, CAPACITY, COLLISION = "#D4D7DA", "#6F8FAF", "#C8322B"
#: Bounds, text and background.
BOUND, LIMIT, INK, MUTED, GRID = "#000000", "#7A7F85", "#1F2428", "#5A6168", "#E4E7EA"
OUTLINE = "#D55E00"  #: around a cell of a map

Dash = tuple[int, tuple[float, ...]]
#: A matplotlib letter, or a star: (corners, 1, rotation in degrees).
Marker = str | tuple[int, int, int]
SOLID: Dash = (0, ())
DASHED: Dash = (0, (3.7, 1.6))
DOTTED: Dash = (0, (1.0, 1.65))
DASH_DOTTED: Dash = (0, (6.4, 1.6, 1.0, 1.6))


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a policy, a bound or a guide."""

    colour: str
    marker: Marker = ""  #: none if empty
    dash: Dash = SOLID
    width: float = 1.4  #: points
    size: float = 4.0  #: points, of the marker
    hollow: bool = False
    alpha: float = 1.0

    def line(self) -> dict[str, Any]:
        """Return the keyword arguments of a matplotlib line that distinguish policies."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dash}

    def scaled(self, size: float) -> Look:
        """Return the same look with another size of its marker."""
        return replace(self, size=size)


#: Eviction policies by name, in the order of legends.
KNOWN: dict[str, Look] = {
    "lru": Look("#0072B2", "o"),
    "lfu": Look("#E69F00", "s"),
    "fifo": Look("#009E73", "^"),
    "random": Look("#8A8F94", "x"),
    "least_stale": Look("#D55E00", "D"),
    "farthest_layer": Look("#CC79A7", "v"),
    "score": Look("#56B4E9", "P"),
    "arc": Look("#882255", "X"),
    "belady": Look("#A3004F", "*"),
    "clock": Look("#332288", "<"),
    "lfu_decay": Look("#8F6300", ">"),
    "payback": Look("#C46210", "P"),
    "slru": Look("#003F63", "p"),
    "lirs": Look("#6A8D2F", "h"),
    "tinylfu": Look("#B3446C", "p"),
    "lfru": Look("#5E3C99", "<"),
    "lru_k": Look("#5B8DB8", "h"),
    "sieve": Look("#117733", "d"),
    "s3fifo": Look("#44AA99", "8"),
    "class_lru": Look("#88CCEE", "H"),
    "least_high_precision": Look("#7A3600", "v"),
    "hobbit": Look("#AA4499", "s"),
    "shielded_score": Look("#1F6F94", "^"),
    "mrs": Look("#999933", "o"),
    "activation_ratio": Look("#CC6677", "D"),
    "static": Look("#4D4D4D", "P"),
    "pinned": Look("#B8A34A", "X"),
}
#: For other names, such as a user's policies: stars, which no known name has, and colours. A hash of the name picks
#: both; a colour near another one of the figure is skipped.
UNKNOWN = ("#661100", "#6699CC", "#AA4466", "#4477AA", "#228833", "#BB5566", "#004488", "#997700")
UNKNOWN_MARKERS: tuple[Marker, ...] = ((4, 1, 0), (6, 1, 0), (3, 1, 0), (8, 1, 0), (4, 1, 45), (5, 1, 36), (3, 1, 60))
#: Further colours for such names.
SPARE = ("#7B2CF0", "#00B7C4", "#F02C9C", "#5A5A00")
FAR = 150  #: distance of two colours that differ enough; the largest is 442
DASHES: tuple[Dash, ...] = tuple(
    (0, gaps) for gaps in ((5, 1.6), (1.4, 1.4), (6, 1.6, 1.4, 1.6), (7.5, 2.5), (3, 1, 1, 1, 1, 1))
)
#: Towards white (positive) or black (negative).
SHADES = (0.25, -0.3, 0.0)
VARIANTS = tuple(product(SHADES, DASHES))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return looks of policies in legend order; a variant whose look is taken gets the next free one."""
    taken: dict[str, Look] = {}
    for name in sorted(set(names), key=_legend_order):
        known = name.partition(":")[0] in KNOWN
        free = (look for look in _candidates(name) if look not in taken.values())
        taken[name] = next(free, look_of(name)) if known else _apart(name, list(taken.values()))
    return taken


def _apart(name: str, others: Sequence[Look]) -> Look:
    """Choose, for an unknown name, a free marker and a colour far from the others."""
    first, markers = look_of(name), {look.marker for look in others}
    at = UNKNOWN.index(_hashed(name.partition(":")[0]).colour)
    shape = UNKNOWN_MARKERS.index(first.marker)
    colours = dict.fromkeys((first.colour, *UNKNOWN[at:], *UNKNOWN[:at], *SPARE))
    near = {colour: min((_distance(colour, look.colour) for look in others), default=FAR) for colour in colours}
    far = next((colour for colour in colours if near[colour] >= FAR), max(colours, key=near.__getitem__))
    free = (each for each in UNKNOWN_MARKERS[shape:] + UNKNOWN_MARKERS[:shape] if each not in markers)
    return replace(first, colour=far if ":" not in name else first.colour, marker=next(free, first.marker))


def _distance(one: str, other: str) -> float:
    ends = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (one, other)]
    return sum((a - b) ** 2 for a, b in zip(*ends, strict=True)) ** 0.5


def look_of(name: str) -> Look:
    """Return the look of one policy: its own colour and marker, shade and dash of its variant."""
    return _candidates(name)[0]


def _candidates(name: str) -> list[Look]:
    """Return looks of one hue, the preferred one first."""
    family, _, parameters = name.partition(":")
    base = KNOWN.get(family) or _hashed(family)
    if not parameters:
        return [base]
    first = _hash(parameters) % len(VARIANTS)
    return [
        replace(base, colour=_shaded(base.colour, shade), dash=dash)
        for shade, dash in (*VARIANTS[first:], *VARIANTS[:first])
    ]


def _hashed(name: str) -> Look:
    number = _hash(name)
    return Look(UNKNOWN[number % len(UNKNOWN)], UNKNOWN_MARKERS[number // len(UNKNOWN) % len(UNKNOWN_MARKERS)])


def _hash(text: str) -> int:
    """Hash a text to the same number in every process, unlike Python's own hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _legend_order(name: str) -> tuple[int, str]:
    family = name.partition(":")[0]
    return (list(KNOWN).index(family) if family in KNOWN else len(KNOWN), name)


def _shaded(colour: str, shade: float) -> str:
    target = 255 if shade > 0 else 0
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (target - channel) * abs(shade)):02X}" for channel in channels)


def in_order(names: Iterable[str]) -> dict[str, Look]:
    """Return looks of a figure's series in their order; names other than eviction policies get the unused looks.

    Markers that cannot be hollow are left out: hollow ones are published numbers.
    """
    wanted = list(dict.fromkeys(names))
    known = looks(name for name in wanted if name.partition(":")[0] in KNOWN)
    left = iter([look for name, look in KNOWN.items() if name not in wanted and look.marker != "x"])
    return {name: known.get(name) or next(left, look_of(name)) for name in wanted}
