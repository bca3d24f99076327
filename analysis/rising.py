"""A loss as a sum of rising terms of what policies change: a weight for each figure of `analysis/changes.py`.

loss = sum of weight * figure ** power; the power is one for all, but 1 for rounding, which is a mean square already.
Another measure than KL may also be KL's sum times one factor: KL is much the less noisy, and they rise together.
Errors count beside the size of the loss, and beside the noise of the points where the loss is below it: the distance of
two losses is that of asinh(loss / noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import asinh, sinh
from typing import NamedTuple

import numpy as np

from moereplay.analysis.changes import COUNTED, Change
from moereplay.analysis.nonnegative import Array, nonnegative

POWERS = (1.0, 1.5, 2.0)
LEAST = 1e-12  #: noise, where examples differ in nothing
ROUNDS, SETTLED = 20, 1e-4  #: of weighting anew, at most; relative change at which weights have settled
SLACK = 1 + 1e-9  #: of a measured range, for sums that were made in another order


class Point(NamedTuple):
    """A policy set that was run live."""

    set: str
    policy: str  #: without its parameters
    change: Change
    loss: float  #: how much worse than the unmodified model, in the measure's units
    error: float  #: half the 95 % interval of `loss` over 1.96: its standard error, and more of few examples
    kl: tuple[float, float] | None = None  #: KL of the same run and the same of it, where it was measured


class Form(NamedTuple):
    """What a fit looks like."""

    power: float
    through_kl: bool = False  #: whether weights are those of KL, times one factor


class Refusal(NamedTuple):
    """Why there is no forecast."""

    kind: str  #: which many share
    why: str  #: with the figures


class Rising(NamedTuple):
    """A fit, and how far the points that it is of reach."""

    form: Form
    weights: Change
    noise: float  #: `error` of a middling point, in the measure's units
    most: Change  #: of every figure among the points

    def at(self, change: Change) -> float:
        """The loss of a change."""
        return float(_terms(change, self.form.power) @ np.array(self.weights))

    def terms(self, change: Change) -> Change:
        """What each figure adds to the loss."""
        return Change(*map(float, _terms(change, self.form.power) * np.array(self.weights)))

    def refusal(self, change: Change) -> Refusal | None:
        """Why nothing can be said of a change: a figure beyond what was measured. None if something can."""
        for name, value, most in zip(Change._fields, change, self.most, strict=True):
            if value > most * SLACK:
                kind = f"more {name} than measured" if most else f"no {name} was measured"
                reached = f"the live points reach {most:.4g}" if most else "no live point has any"
                return Refusal(kind, f"{name} ({COUNTED[name]}) is {value:.4g}, and {reached}")
        return None


def distance(found: float, expected: float, noise: float) -> float:
    """Between two losses, on the scale on which intervals are equally wide."""
    return abs(asinh(found / noise) - asinh(expected / noise))


def moved(loss: float, by: float, noise: float) -> float:
    """The loss that lies so far from another on that scale."""
    return noise * sinh(asinh(loss / noise) + by)


def forms_of(points: Sequence[Point]) -> list[Form]:
    """All that can be fitted to points."""
    ways = (False, True) if all(each.kl for each in points) else (False,)
    return [Form(power, through_kl) for power in POWERS for through_kl in ways]


def fitted(points: Sequence[Point], form: Form, noise: float) -> Rising:
    """The fit whose errors, beside the size of each loss or the noise, are smallest in the square."""
    columns = np.array([_terms(each.change, form.power) for each in points])
    losses = np.array([each.loss for each in points])
    if form.through_kl:
        kl, errors = np.array([each.kl for each in points]).T
        weights = _weights(columns, kl, max(float(np.median(errors)), LEAST))
        weights = weights * _weights((columns @ weights)[:, None], losses, noise)
    else:
        weights = _weights(columns, losses, noise)
    most = Change(*map(max, zip(*(each.change for each in points), strict=True)))
    return Rising(form, Change(*map(float, weights)), noise, most)


def _weights(columns: Array, losses: Array, noise: float) -> Array:
    """(c,) for columns (n, c) that add up to losses (n,), each off by its own size, or by the noise if that is more."""
    weights = nonnegative(columns, losses)
    for _ in range(ROUNDS):
        scale, before = np.hypot(noise, columns @ weights), weights
        weights = nonnegative(columns / scale[:, None], losses / scale)
        if np.allclose(weights, before, rtol=SETTLED, atol=0):
            break
    return weights


def _terms(change: Change, power: float) -> Array:
    raised = Change(*(value**power for value in change))
    return np.array(raised._replace(rounding=change.rounding))
