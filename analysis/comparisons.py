"""Whether one configuration beats another over the same requests: yes, no, or can't tell.

Rows are those of requests, as results have them. A figure is a ratio of sums over them (`PARTS`), and better when
larger or smaller, as `RANKED` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.bootstrap import Interval, Pairs, difference, interval
from analysis.ratios import RANKED, RATIOS, Ratio
from results.errors import unknown

Rows = Sequence[Mapping[str, Any]]  #: of requests, each with its number as `request`

YES, NO, CANT_TELL = "yes", "no", "can't tell"
#: The chance below which an answer is given: with it two seeds of one policy differ in less than 5 % of cases, as
#: requests that share a cache are a little less than independent (`make study-coverage`).
SURE = 0.04
#: The figures that can be compared: the ratio of a request's counters, and the factor of the column.
PARTS: dict[str, tuple[Ratio, float]] = {
    "hit_rate": (RATIOS["hit_rate"], 1.0),
    "collisions_per_miss": (RATIOS["collisions_per_miss"], 1.0),
    "tpot_ms": (Ratio(("decode_ns",), ("decode_passes",)), 1e-6),
    "tokens_per_s": (Ratio(("decode_passes",), ("decode_ns",)), 1e9),
}


class Comparison(NamedTuple):
    """A figure of A less that of B, half its 95 % interval, the chance of a larger one, and whether A beats B.

    `off` and `p` are None where nothing says how sure the difference is.
    """

    difference: float | None
    off: float | None
    p: float | None
    answer: str
    requests: int


NOTHING = Comparison(None, None, None, CANT_TELL, 0)  #: no request is known of both


def compare(rows_a: Rows, rows_b: Rows, figure: str, seed: int = 0) -> Comparison:
    """Whether A beats B in a figure, over the requests that both have.

    Raises ResultError if the figure is none of `PARTS`.
    """
    parts, factor = _parts(figure)
    pairs = paired(rows_a, rows_b, parts)
    if pairs is None:
        return NOTHING
    found = difference(*pairs, seed=seed)
    off = None if found.off is None else found.off * factor
    made = Comparison(found.value * factor, off, found.p, CANT_TELL, found.requests)
    return answered(made, found.p, figure)


def estimate(rows: Rows, figure: str, seed: int = 0) -> Interval | None:
    """A figure with its 95 % interval; None where no request has it. Raises ResultError for an unknown figure."""
    (over, under), factor = _sides(figure), _parts(figure)[1]
    pairs = [(row[over] or 0, row[under] or 0) for row in rows if row[under]]
    if not pairs:
        return None
    found = interval(pairs, seed)
    low, high = (None if end is None else end * factor for end in (found.low, found.high))
    return Interval(found.value * factor, low, high, found.requests)


def against(one: Rows, others: Sequence[Rows], figure: str, seed: int = 0, picked: bool = False) -> list[Comparison]:
    """One configuration beside each of the others, corrected for that many comparisons by Holm's method.

    `picked` says that the same requests chose it as the best of all: then every pair of configurations counts as
    compared, as any of them could have been the best.
    """
    found = [compare(one, rows, figure, seed) for rows in others]
    known = [each for each in found if each.p is not None]
    family = (len(known) + 1) * len(known) // 2 if picked else len(known)
    corrected = iter(holm([each.p or 0.0 for each in known], family))
    return [each if each.p is None else answered(each, next(corrected), figure) for each in found]


def holm(chances: Sequence[float], family: int | None = None) -> list[float]:
    """Each chance corrected for all comparisons of the family (Holm, A Simple Sequentially Rejective Multiple Test
    Procedure, 1979); those of the family that are not given are taken to show nothing."""
    family = len(chances) if family is None else family
    order = np.argsort(chances, kind="stable")
    corrected, least = [0.0] * len(chances), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(1.0, (family - rank) * chances[at]))
        corrected[at] = least
    return corrected


def answered(made: Comparison, p: float | None, figure: str) -> Comparison:
    """The comparison with this chance, and the answer that it gives."""
    if p is None or p >= SURE or not made.difference:
        return made._replace(p=p, answer=CANT_TELL)
    return made._replace(p=p, answer=YES if (made.difference > 0) == RANKED[figure] else NO)


def paired(rows_a: Rows, rows_b: Rows, parts: Ratio) -> tuple[Pairs, Pairs] | None:
    """Numerators and denominators of every request that has any in either; None where there is none of both."""
    (over,), (under,) = parts.over, parts.under
    ours, theirs = ({row["request"]: row for row in rows} for rows in (rows_a, rows_b))
    shared = [name for name in ours if name in theirs and (ours[name][under] or theirs[name][under])]
    left, right = ([(rows[name][over] or 0, rows[name][under] or 0) for name in shared] for rows in (ours, theirs))
    return (left, right) if all(sum(under for _, under in side) for side in (left, right)) else None


def _parts(figure: str) -> tuple[Ratio, float]:
    if figure not in PARTS:
        raise unknown("figure to compare", figure, PARTS)
    return PARTS[figure]


def _sides(figure: str) -> tuple[str, str]:
    (over,), (under,) = _parts(figure)[0].over, _parts(figure)[0].under
    return over, under
