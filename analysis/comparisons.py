"""Paired comparison of configurations over the same requests: better, not better, or undecided.

Rows are per-request rows of results. A figure is a ratio of sums over them (`PARTS`); `RANKED` says whether larger or
smaller is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np

from moereplay.analysis.statistics import ONE, Interval, Pairs, difference, interval, one_dominates, unearned
from moereplay.results.errors import unknown
from moereplay.results.result import METRICS, MISS_RATE, RANKED, Metric, named

Rows = Sequence[Mapping[str, Any]]  #: per-request rows, numbered by `request`

YES, NO, CANT_TELL = "yes", "no", "can't tell"
CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "cannot tell"  #: answers to a claim
#: Significance level. Requests that share a cache are not quite independent: at this level two seeds of one policy
#: differ in less than 5 % of cases (`make study-coverage`).
TEST_LEVEL = 0.04
COLD = 1  #: requests that meet an empty cache; where a reset empties it before each, the first is like the others
DECIDED = ("accesses", "hits", "late", "misses")  #: counters of a request that follow from policy decisions
#: The metrics that can be compared, as the counters of a request give them.
PARTS = {name: METRICS[name] for name in ("hit_rate", "collisions_per_miss", "tpot_ms", "tokens_per_s", "ttft_mean_ms")}
#: Columns of a request's row that comparisons read.
READ = ("request", "start_ns", "end_ns", "ttft_ns", "decode_ns", "decode_tokens", *DECIDED, "collisions")


#: Figures that have an interval but no column in a ranking.
ESTIMATED = {"misses_per_access": MISS_RATE, "collisions_per_access": METRICS["collisions_per_access"]}


class Comparison(NamedTuple):
    """Figure of A minus that of B, half its 95 % CI, its p-value, and whether A is better.

    `off` and `p` are None if the uncertainty is unknown; `p` is corrected if several comparisons were made.
    """

    difference: float | None
    off: float | None
    p: float | None
    answer: str
    requests: int
    counted: Counted | None = None  #: request by request
    shared: bool = False  #: whether requests shared passes, which makes them unusable as samples
    alone: float | None = None  #: `p` before the correction

    @property
    def tested(self) -> bool:
        """Whether the requests are enough for a test."""
        return self.p is not None and self.requests >= FEW


class Counted(NamedTuple):
    """Numbers of requests on which A is above, equal to and below B, with the extreme differences."""

    above: int
    equal: int
    below: int
    least: float  #: of the differences
    most: float
    least_share: float | None  #: of the relative differences; None if one of B's is zero
    most_share: float | None

    @property
    def requests(self) -> int:
        """Number of requests that have the figure under both."""
        return self.above + self.equal + self.below


NOTHING = Comparison(None, None, None, CANT_TELL, 0)  #: no shared request


def compare(rows_a: Rows, rows_b: Rows, figure: str) -> Comparison:
    """Compare A with B in a figure over the requests that both have; fewer than `FEW` give a p-value without interval.

    Raises ResultError for a figure that is not in `PARTS`.
    """
    figure = named(figure)
    parts = compared(figure)
    factor = parts.factor
    pairs = paired(rows_a, rows_b, parts)
    if pairs is None:
        return NOTHING
    counted = _counted(*pairs, factor)
    if shares_passes(rows_a) or shares_passes(rows_b):
        (over, under), (over_b, under_b) = (np.sum(side, axis=0) for side in pairs)
        less = float(over / under - over_b / under_b) * factor
        return Comparison(less, None, None, CANT_TELL, len(pairs[0]), counted, shared=True)
    found = difference(*pairs, COLD)
    off = None if found.off is None or _no_interval(found.off, pairs, parts) else found.off * factor
    made = Comparison(found.value * factor, off, found.p, CANT_TELL, found.requests, counted, alone=found.p)
    return answered(made, found.p, figure)


def changed(rows_a: Rows, rows_b: Rows, figure: str, gate: float) -> Interval | None:
    """Return A's figure over B's, minus 1, with its 95 % CI; None if no shared request has it, or if B's is 0.

    The interval is that of A - (1 + `gate`) B, as a share of B: all of it is on one side of the gate where that has one
    sign. Raises ResultError for a figure that cannot be compared.
    """
    parts = compared(figure)
    pairs = paired(rows_a, rows_b, parts)
    if pairs is None or not (theirs := sum(over for over, _ in pairs[1]) / sum(under for _, under in pairs[1])):
        return None
    found = difference(pairs[0], [(over * (1 + gate), under) for over, under in pairs[1]], COLD)
    shared = shares_passes(rows_a) or shares_passes(rows_b)
    why, value = SHARE_PASSES if shared else _no_interval(found.off, pairs, parts), gate + found.value / theirs
    off = None if why or found.off is None else found.off / theirs
    low, high = (None, None) if off is None else (value - off, value + off)
    return Interval(value, low, high, found.requests, why)


def claimed(found: Interval | None, gate: float, at_most: bool) -> str:
    """Return whether a change of at most, or at least, `gate` is confirmed or refuted by its whole 95 % CI."""
    if found is None or found.low is None or found.high is None:
        return OPEN
    low, high, limit = (found.low, found.high, gate) if at_most else (-found.high, -found.low, -gate)
    return CONFIRMED if high <= limit else REFUTED if low > limit else OPEN


def _no_interval(off: float | None, pairs: tuple[Pairs, Pairs], parts: Metric) -> str:
    """Return why a difference has no interval; empty if it has one."""
    if len(pairs[0]) < FEW:
        return TOO_FEW
    return ONE if off is None or any(one_dominates(side, COLD, _is_share(parts)) for side in pairs) else ""


def shares_passes(rows: Rows) -> bool:
    """Return whether any two requests ran at the same time, as under `batch:N` or a pass scheduler.

    A pass of several requests is charged to one of them, so per-request rows are then not independent samples.
    """
    known = sorted((row["start_ns"], row["end_ns"]) for row in rows if row.get("end_ns") is not None)
    return any(after[0] < before[1] for before, after in pairwise(known))


def same_decisions(rows_a: Rows, rows_b: Rows) -> bool:
    """Return whether every request has the same hits, misses and delayed hits under both; False without requests."""
    ours, theirs = ({row["request"]: [row.get(name) for name in DECIDED] for row in rows} for rows in (rows_a, rows_b))
    return bool(ours) and ours == theirs


def _counted(ours: Pairs, theirs: Pairs, factor: float) -> Counted | None:
    both = [(a / b, c / d) for (a, b), (c, d) in zip(ours, theirs, strict=True) if b and d]
    if not both:
        return None
    less = [(one - other) * factor for one, other in both]
    shares = None if any(not other for _, other in both) else [one / other - 1 for one, other in both]
    above, below = sum(each > 0 for each in less), sum(each < 0 for each in less)
    ends = (None, None) if shares is None else (min(shares), max(shares))
    return Counted(above, len(less) - above - below, below, min(less), max(less), *ends)


def by_count(made: Comparison, figure: str) -> Comparison:
    """Decide a comparison by counting: better or worse only if all requests agree.

    For configurations that can differ in time alone: each request's difference is exact, so no test is needed.
    """
    counted, answer = made.counted, CANT_TELL
    if counted is not None and counted.requests in (counted.above, counted.below):
        answer = YES if (counted.above > 0) == RANKED[figure] else NO
    return made._replace(p=None, answer=answer)


def estimate(rows: Rows, figure: str) -> Interval | None:
    """Return a figure with its 95 % CI; None if no request has it. Raises ResultError for an unknown figure.

    Requests that shared passes, and fewer than `FEW`, give the figure without an interval.
    """
    parts = compared(figure)
    (over,), (under,), factor = parts.over, parts.under, parts.factor
    pairs = [(_part(row, over), _part(row, under)) for row in _as_run(rows) if _part(row, under)]
    if not pairs:
        return None
    share = _is_share(parts)
    found = interval(pairs, COLD, share)
    why = SHARE_PASSES if shares_passes(rows) else TOO_FEW if len(pairs) < FEW else unearned(pairs, COLD, share)
    low, high = (None if why or end is None else end * factor for end in (found.low, found.high))
    return Interval(found.value * factor, low, high, found.requests, why)


def against(
    one: Rows,
    others: Sequence[Rows],
    figure: str,
    picked: bool = False,
    exact: Sequence[bool] = (),
) -> list[Comparison]:
    """Compare one configuration with each of the others, corrected by Holm's method.

    With `picked`, the same requests chose it as the best of all: every pair then counts as a comparison, since any
    configuration could have been the best. `exact` marks configurations that can differ only in time; they are counted,
    not tested (`by_count`).
    """
    figure = named(figure)
    found = [compare(one, rows, figure) for rows in others]
    found = [by_count(each, figure) if at < len(exact) and exact[at] else each for at, each in enumerate(found)]
    tested = [each.p for each in found if each.p is not None]
    family = pairs_of(len(tested) + 1) if picked else len(tested)
    corrected = iter(holm(tested, family))
    return [each if each.p is None else answered(each, next(corrected), figure) for each in found]


def pairs_of(many: int) -> int:
    """Return the number of pairs among `many` configurations."""
    return many * (many - 1) // 2


def enough(family: int) -> int:
    """Return the smallest number of requests that can give a significant lead among the given comparisons.

    If two are equally good, each request favours one at random: all agree with probability 2 ** (1 - n), which is the
    smallest p-value of a sign-flip test.
    """
    return next(n for n in count(2) if family * 2.0 ** (1 - n) < TEST_LEVEL)


FEW = enough(1)  #: fewest requests with an interval: no lead over fewer is significant
TOO_FEW, SHARE_PASSES = f"fewer than {FEW} requests", "requests share passes"  #: reasons for no interval


def holm(chances: Sequence[float], family: int | None = None) -> list[float]:
    """Correct p-values for a family of comparisons (Holm, A Simple Sequentially Rejective Multiple Test Procedure,
    1979).

    Members of the family without a p-value count as not significant.
    """
    family = len(chances) if family is None else family
    order = np.argsort(chances, kind="stable")
    corrected, least = [0.0] * len(chances), 0.0
    for rank, at in enumerate(order):
        least = max(least, min(1.0, (family - rank) * chances[at]))
        corrected[at] = least
    return corrected


def answered(made: Comparison, p: float | None, figure: str) -> Comparison:
    """Return the comparison with this p-value and the answer that follows from it."""
    if p is None or p >= TEST_LEVEL or not made.difference:
        return made._replace(p=p, answer=CANT_TELL)
    return made._replace(p=p, answer=YES if (made.difference > 0) == RANKED[figure] else NO)


def paired(rows_a: Rows, rows_b: Rows, parts: Metric) -> tuple[Pairs, Pairs] | None:
    """Return (numerator, denominator) of the shared requests on both sides; None if a side has no denominator."""
    (over,), (under,) = parts.over, parts.under
    ours, theirs = ({row["request"]: row for row in _as_run(rows)} for rows in (rows_a, rows_b))
    shared = [name for name in ours if name in theirs and (_part(ours[name], under) or _part(theirs[name], under))]
    left, right = ([(_part(rows[name], over), _part(rows[name], under)) for name in shared] for rows in (ours, theirs))
    return (left, right) if all(sum(under for _, under in side) for side in (left, right)) else None


def _as_run(rows: Rows) -> Rows:
    """Return requests in the order in which they started, which arrivals can make another than that of the trace."""
    return sorted(rows, key=lambda row: row.get("start_ns") or 0)


def _part(row: Mapping[str, Any], name: str) -> int:
    """Return a counter of a request's row; a missing one is 0."""
    if name == "prefills":
        return int(row.get("ttft_ns") is not None)
    return row[name] or 0


def compared(figure: str) -> Metric:
    """Return the metric of a figure. Raises ResultError for one that cannot be compared."""
    known = PARTS | ESTIMATED
    if named(figure) not in known:
        raise unknown("figure to compare", figure, known)
    return known[named(figure)]


def _is_share(parts: Metric) -> bool:
    return parts.under in (("accesses",), ("misses",))
