"""Fit quality losses to the changes by policies, with leave-one-out errors.

A run's fidelity counters become a `Change`; losses of live runs are fitted by a sum of its rising terms, so that no
change costs nothing and more of a figure never costs less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import asinh, ceil, inf, sinh, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moereplay.results.errors import ResultError
from moereplay.results.result import METRICS, Metric

LEVEL = 0.9  #: coverage of an interval
POWERS = (1.0, 1.5, 2.0)
LEAST = 1e-12  #: noise if all examples are equal
ROUNDS, SETTLED = 20, 1e-4  #: most rounds of reweighting, and the relative change that ends them
SLACK = 1 + 1e-9  #: tolerance of a measured range, for sums in another order
Array = NDArray[np.float64]
#: Counters of each figure, for messages.
COUNTED = {
    "lost": "(mass - mass_kept)**2 per lost assignment",
    "variation": "variation / mass",
    "substitution": "mass_substituted / mass",
    "dropping": "mass_dropped / mass",
    "displacement": "rank_displacement / assignments",
    "rounding": "the mass below each precision and the bits of the miss policy",
}
#: Ratios from which a change is computed.
READ = (
    *("mass_share_kept", "choice_kept", "mean_variation", "mass_share_substituted", "mass_share_dropped"),
    "mean_displacement",
)
#: Nested counters of gate weight below the first, second and third precision of a miss policy.
BELOW = ("mass_low_precision", "mass_below_second", "mass_below_third")
#: Relative error of an expert's output in steps of rounding: `affine` on normal weights, as docs/precision.md measured.
STEP_ERROR = 2.4


class Change(NamedTuple):
    """Distance of a run's mixtures from the router's own; all zero if the output is unchanged.

    Counters do not hold bits, so rounding follows from the precisions of the miss policy and of the stored model.
    """

    lost: float  #: share of gate weight that did not run as chosen, times its mean size relative to other assignments
    variation: float  #: half |w - w'| between original and used mixture, as a share of gate weight
    substitution: float  #: share of gate weight whose expert was replaced by another
    dropping: float  #: share of gate weight that was dropped
    displacement: float  #: mean rank difference between an assignment's expert and its slot
    rounding: float  #: mean square rounding error, relative to that of one bit


NOTHING = Change(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def change_of(counters: Mapping[str, int | None], miss: str, stored: float) -> Change:
    """Return the change of a run from its totals, its miss policy in full spelling, and the model's stored bits.

    Raises ResultError if a counter is missing or the trace has no gate weights.
    """
    found = {name: METRICS[name].value(counters) for name in READ}
    if None in found.values():
        raise ResultError("missing gate weights: replay a trace that has them, with this version")
    kept, chosen, variation, substituted, dropped, ranks = (value or 0.0 for value in found.values())
    at_bits = _by_bits(counters, 1 - dropped, tiers_of(miss))
    rounding = sum(share * _rounding_error(bits, stored) for bits, share in at_bits)
    # one heavy expert counts more than several light ones
    lost = (1 - kept) * (1 - kept) / (1 - chosen) if chosen < 1 else 0.0
    return Change(lost, variation, substituted, dropped, ranks, rounding)


def mass_changed(counters: Mapping[str, int | None], miss: str, stored: float) -> float | None:
    """Return the open-loop stand-in for quality, None without gate weights: the gate mass changed, as a share.

    Dropped and replaced experts count in full, what ran as chosen but at few bits by `mass_rounded`. Arguments are
    those of `change_of`.
    """
    kept, rounded = METRICS["mass_share_kept"].value(counters), mass_rounded(counters, miss, stored)
    return None if kept is None or rounded is None else 1 - kept + rounded


def mass_rounded(counters: Mapping[str, int | None], miss: str, stored: float) -> float | None:
    """Return the share of gate weight that ran as chosen at few bits, times the relative error of the output."""
    kept = METRICS["mass_share_kept"].value(counters)
    if kept is None:
        return None
    return sum(share * output_error(bits, stored) for bits, share in _by_bits(counters, kept, tiers_of(miss)))


def output_error(bits: float, stored: float) -> float:
    """Return the relative error of an expert's output at some bits, at most 1; 0 stands for the stored bits."""
    return min(STEP_ERROR * sqrt(_rounding_error(bits, stored)), 1.0)


def tiers_of(miss: str) -> Sequence[float]:
    """Return the precisions of a miss policy in full spelling, best first; 0 means the stored precision."""
    found = re.search(r":bits=([\d./]+)", miss)
    return [float(bits) for bits in found[1].split("/")] if found else [0.0]


def stored_bits(dtype: str) -> float:
    """Return the bits per weight of a model type: 32 for `float32`, 4 for `bfloat16+bnb-4bit`."""
    found = re.search(r"\d+", dtype.rpartition("+")[2])
    return float(found[0]) if found else 16.0


def policy_of(config: Mapping[str, Any]) -> str:
    """Name the policies of a configuration that change the model's output: `cache_prior`, `prune+drop`."""
    names = [config[kind].partition(":")[0] for kind in ("routing", "miss")]
    return "+".join(name for name in names if name not in ("standard", "fetch")) or "fetch"


def _by_bits(counters: Mapping[str, int | None], ran: float, tiers: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield the bits of each tier and its share of gate weight, `ran` in all.

    In results without the counters of lower tiers, everything below the first tier counts as the last; with more than
    four tiers, everything below the third does.
    """
    below = [ran]
    for name in BELOW[: len(tiers) - 1]:
        below.append(below[-1] if counters.get(name) is None else Metric((name,), ("mass",)).value(counters) or 0.0)
    for tier, share in enumerate(below):
        last = tier == len(below) - 1
        yield tiers[-1 if last else tier], share if last else max(share - below[tier + 1], 0.0)


def _rounding_error(bits: float, stored: float) -> float:
    """Return the mean square error of rounding to 2**bits values, relative to that of two values."""
    return 0.0 if bits == 0 or bits >= stored else 1 / (2**bits - 1) ** 2


class Point(NamedTuple):
    """A policy set that was run live."""

    set: str
    policy: str  #: its name without parameters
    change: Change
    loss: float  #: compared with the unmodified model, in the measure's units
    error: float  #: half the 95 % CI of `loss` over 1.96: its standard error, or more for few examples
    kl: tuple[float, float] | None = None  #: KL loss and error of the same run, if measured


class Form(NamedTuple):
    """The shape of a fit."""

    power: float
    through_kl: bool = False  #: whether the weights are KL's times one factor


class Refusal(NamedTuple):
    """The reason for a missing forecast."""

    kind: str  #: groups refusals
    why: str  #: the reason with numbers


class Rising(NamedTuple):
    """Loss as a sum of rising terms, one for each field of `Change`, with the range of the points that it was fitted
    to.

    loss = sum of weight * figure ** power. The power is shared by all figures except rounding, which is a mean square
    already. A measure other than KL may also be KL's sum times one factor, because KL is much less noisy and they rise
    together. Errors count relative to the loss, or to the noise of the points where the loss is smaller: the distance
    of two losses is that of asinh(loss / noise).
    """

    form: Form
    weights: Change
    noise: float  #: median `error` of the points, in the measure's units
    most: Change  #: largest value of every figure among the points

    def at(self, change: Change) -> float:
        """Return the loss of a change."""
        return float(_terms(change, self.form.power) @ np.array(self.weights))

    def terms(self, change: Change) -> Change:
        """Return the part of each figure in the loss."""
        return Change(*map(float, _terms(change, self.form.power) * np.array(self.weights)))

    def refusal(self, change: Change) -> Refusal | None:
        """Return why a change cannot be forecast: a figure is beyond the measured range. None if it can."""
        for name, value, most in zip(Change._fields, change, self.most, strict=True):
            if value > most * SLACK:
                kind = f"more {name} than measured" if most else f"no {name} was measured"
                reached = f"the live points reach {most:.4g}" if most else "no live point has any"
                return Refusal(kind, f"{name} ({COUNTED[name]}) is {value:.4g}, and {reached}")
        return None


def distance(found: float, expected: float, noise: float) -> float:
    """Return the distance of two losses on the scale on which all intervals have the same width."""
    return abs(asinh(found / noise) - asinh(expected / noise))


def moved(loss: float, by: float, noise: float) -> float:
    """Return the loss at a distance from another on that scale."""
    return noise * sinh(asinh(loss / noise) + by)


def forms_of(points: Sequence[Point]) -> list[Form]:
    """Return all forms that can be fitted to the points."""
    ways = (False, True) if all(point.kl for point in points) else (False,)
    return [Form(power, through_kl) for power in POWERS for through_kl in ways]


def fitted(points: Sequence[Point], form: Form, noise: float) -> Rising:
    """Fit by least squares of errors relative to each loss or to the noise."""
    columns = np.array([_terms(point.change, form.power) for point in points])
    losses = np.array([point.loss for point in points])
    if form.through_kl:
        kl, errors = np.array([point.kl for point in points]).T
        weights = _weights(columns, kl, max(float(np.median(errors)), LEAST))
        weights = weights * _weights((columns @ weights)[:, None], losses, noise)
    else:
        weights = _weights(columns, losses, noise)
    most = Change(*map(max, zip(*(point.change for point in points), strict=True)))
    return Rising(form, Change(*map(float, weights)), noise, most)


def _weights(columns: Array, losses: Array, noise: float) -> Array:
    """Return (c,) weights >= 0 for columns (n, c) that sum to losses (n,), each with an error relative to its size or
    the noise.
    """
    from scipy.optimize import nnls  # imported here: it takes longer to import than most commands run

    weights = nnls(columns, losses)[0]
    for _ in range(ROUNDS):
        scale, before = np.hypot(noise, columns @ weights), weights
        weights = nnls(columns / scale[:, None], losses / scale)[0]
        if np.allclose(weights, before, rtol=SETTLED, atol=0):
            break
    return weights


def _terms(change: Change, power: float) -> Array:
    raised = Change(*(value**power for value in change))
    return np.array(raised._replace(rounding=change.rounding))


class Left(NamedTuple):
    """A live point, and its forecasts from other points."""

    point: Point
    by_others: float | None  #: from points of other policies; None if they refuse
    by_rest: float | None  #: from all other points; None if they refuse

    @property
    def best(self) -> float | None:
        """The forecast from other policies, or from the other points if those refuse."""
        return self.by_rest if self.by_others is None else self.by_others


def leave_out(points: Sequence[Point], form: Form, noise: float, whole: bool = True) -> list[Left]:
    """Forecast every point from the others (leave one out); unless `whole`, from the other points only where other
    policies refuse.

    Points of other policies show how a policy that was never run live would fare. A point out of reach of the others
    has no error.
    """
    policies = dict.fromkeys(point.policy for point in points)
    others = {name: _fit([point for point in points if point.policy != name], form, noise) for name in policies}
    left = [Left(own, _answer_of(others[own.policy], own), None) for own in points]
    asked = [at for at, each in enumerate(left) if whole or each.by_others is None]
    for at in asked:
        rest = _fit([*points[:at], *points[at + 1 :]], form, noise)
        left[at] = left[at]._replace(by_rest=_answer_of(rest, points[at]))
    return left


def best_form(points: Sequence[Point], noise: float, whole: bool = True) -> tuple[Form, list[Left]]:
    """Return the form with the smallest mean leave-one-out error, and its forecasts."""
    tried = [(form, leave_out(points, form, noise, whole)) for form in forms_of(points)]
    return min(tried, key=lambda each: _mean(distances(each[1], noise)))


def distances(left: Sequence[Left], noise: float) -> list[float]:
    """Return leave-one-out errors: distances between measured and forecast losses, where a forecast exists."""
    return [distance(each.point.loss, each.best, noise) for each in left if each.best is not None]


def reach_of(found: Sequence[float]) -> float:
    """Return the distance that covers `LEVEL` of new points (split conformal); infinite if errors are too few."""
    place = ceil((len(found) + 1) * LEVEL)
    return sorted(found)[place - 1] if place <= len(found) else inf


def _fit(points: Sequence[Point], form: Form, noise: float) -> Rising | None:
    return fitted(points, form, noise) if points else None


def _answer_of(fit: Rising | None, point: Point) -> float | None:
    return None if fit is None or fit.refusal(point.change) else fit.at(point.change)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else inf
