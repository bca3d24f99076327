"""How far a fit is off where it was not fitted: every live point forecast from the others.

A point is forecast twice: from the points of other policies, which is how a policy that was never run live would fare,
and from all points but itself. What the remaining points do not reach is refused there too, and counts as no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from moereplay.analysis.rising import Form, Point, Rising, distance, fitted, forms_of

LEVEL = 0.9  #: of losses lie in an interval


class Left(NamedTuple):
    """A live point as others forecast it."""

    point: Point
    by_others: float | None  #: from the points of other policies; None where they refuse
    by_rest: float | None  #: from all other points; None where they refuse

    @property
    def best(self) -> float | None:
        """By other policies, or by the rest where these refuse."""
        return self.by_rest if self.by_others is None else self.by_others


def leave_out(points: Sequence[Point], form: Form, noise: float, whole: bool = True) -> list[Left]:
    """Every point, forecast by others; unless `whole`, by the rest only where the other policies refuse."""
    policies = dict.fromkeys(each.policy for each in points)
    others = {name: _fit([each for each in points if each.policy != name], form, noise) for name in policies}
    left = [Left(own, _said(others[own.policy], own), None) for own in points]
    asked = [at for at, each in enumerate(left) if whole or each.by_others is None]
    for at in asked:
        rest = _fit([*points[:at], *points[at + 1 :]], form, noise)
        left[at] = left[at]._replace(by_rest=_said(rest, points[at]))
    return left


def best_form(points: Sequence[Point], noise: float, whole: bool = True) -> tuple[Form, list[Left]]:
    """The form by which others forecast best, in the mean distance, and what they do with it."""
    tried = [(form, leave_out(points, form, noise, whole)) for form in forms_of(points)]
    return min(tried, key=lambda each: _mean(distances(each[1], noise)))


def distances(left: Sequence[Left], noise: float) -> list[float]:
    """Between the loss of a point and what others forecast of it, for those of which they do."""
    return [distance(each.point.loss, each.best, noise) for each in left if each.best is not None]


def reach_of(found: Sequence[float]) -> float:
    """The distance within which `LEVEL` of what is forecast lies (split conformal); infinite of too few."""
    place = ceil((len(found) + 1) * LEVEL)
    return sorted(found)[place - 1] if place <= len(found) else inf


def _fit(points: Sequence[Point], form: Form, noise: float) -> Rising | None:
    return fitted(points, form, noise) if points else None


def _said(fit: Rising | None, point: Point) -> float | None:
    return None if fit is None or fit.refusal(point.change) else fit.at(point.change)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else inf
