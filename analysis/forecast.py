"""FORECAST: quality loss of policy sets that were not run live, from the fidelity counters of their replays.

Losses of some live points of a model (`moereplay quality`) are fitted by a sum of rising terms. An interval is as wide
as the errors of leaving policies out: nine in ten live runs of as many examples lie inside. Another model, a kind of
change that no live point has, and a larger change than any live point has are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import asinh, ceil, inf, isfinite, isinf, log, sinh
from statistics import median
from sys import float_info
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from moereplay.analysis.quality import Judged, judged
from moereplay.results.metrics import METRICS
from moereplay.results.quality import UNMODIFIED
from moereplay.results.result import ResultError, unknown
from moereplay.results.settings import KINDS

NLL, KL = "nll", "kl"  #: the measure whose loss is a rise of perplexity, and the one with the least noise
FEWEST, FEWEST_POLICIES = 9, 3  #: live points, so that an interval of nine in ten has an end; policies among them
LARGEST_EXPONENT = log(float_info.max)  #: nats of which no perplexity is a number any more
NORMAL_95 = 1.96  #: half a 95 % interval is so many standard errors where examples are many


class Answer(NamedTuple):
    """A forecast in the measure's units, or why there is none."""

    loss: float | None = None
    low: float | None = None
    high: float | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Forecast:
    """What live points of one model, task and measure say of other policy sets."""

    model: str
    dtype: str
    task: str
    measure: str
    points: Sequence[Point]
    fit: Rising
    left: Sequence[Left]  #: every point, forecast by others
    reach: float  #: half an interval, on the scale of `rising.distance`

    def of(self, counters: Mapping[str, int | None], miss: str, model: str) -> Answer:
        """Of the totals of a replay of a model, under a miss policy in its full spelling."""
        if model != self.model:
            why = f"the trace is of {model or 'an unnamed model'}, the live points are of {self.model}"
            return Answer(refusal=Refusal("another model", why))
        try:
            change = change_of(counters, miss, stored_bits(self.dtype))
        except ResultError as error:
            return Answer(refusal=Refusal("no gate weights", str(error)))
        return self.at(change)

    def at(self, change: Change) -> Answer:
        """Of a change; none is no loss, for certain."""
        if refusal := self.fit.refusal(change):
            return Answer(refusal=refusal)
        if not any(change):
            return Answer(0.0, 0.0, 0.0)
        loss = self.fit.at(change)
        low, high = (moved(loss, by, self.fit.noise) for by in (-self.reach, self.reach))
        return Answer(loss, low, high)


def forecast(frame: pl.DataFrame, task: str | None = None, measure: str | None = None) -> Forecast:
    """From a frame of `results.quality`: of its first task and of `nll` unless `task` and `measure` say others.

    Raises ResultError for an unknown task or measure, and for live points that are too few or too much alike.
    """
    rows = frame.filter(pl.col("task") == _chosen("task", task, frame["task"].unique(maintain_order=True).to_list()))
    found = [each for each in judged(rows) if each.change is not None]
    measure = _chosen(
        "measure", measure, sorted({each.measure for each in found}, key=lambda name: (name != NLL, name))
    )
    points = points_of(rows, found, measure)
    noise = _noise(points)
    form, left = best_form(points, noise)
    reach = reach_of(distances(left, noise))
    if isinf(reach):
        raise ResultError("too few live points lie within the reach of the others; run policies at more strengths live")
    about = rows["about"][0]
    fit = fitted(points, form, noise)
    return Forecast(about["model"], about["dtype"], rows["task"][0], measure, points, fit, left, reach)


def points_of(rows: pl.DataFrame, found: Sequence[Judged], measure: str) -> list[Point]:
    """The live points of a task by one measure: the sets that change what the model answers."""
    losses = {each.set: _finite(each) for each in found if each.measure == measure}
    kl = {each.set: _measured(_finite(each)) for each in found if each.measure == KL != measure}
    live = rows.filter(pl.col("changes_output") & (pl.col("set") != UNMODIFIED))
    return [
        Point(row["set"], policy_of(row["config"]), _change(row), *_measured(losses[row["set"]]), kl.get(row["set"]))
        for row in live.iter_rows(named=True)
        if row["set"] in losses
    ]


def _finite(judged: Judged) -> Judged:
    """Raises ResultError for a loss that is infinite or no number, as where float16 overflows."""
    if judged.change is not None and not isfinite(judged.change):
        found = f"set {judged.set}: its loss of {judged.measure} is {judged.loss}, and nothing can be fitted to that"
        raise ResultError(f"{found}; run live in a wider --dtype, or take the set out of --sets")
    return judged


def _change(row: Mapping[str, Any]) -> Change:
    spelled = row["about"]["policies"].split(", ")  # a policy of each kind, then how experts of few bits are stored
    miss = dict(zip(KINDS, spelled, strict=False))["miss"]
    return change_of(row["replayed"], miss, stored_bits(row["about"]["dtype"]))


def _measured(judged: Judged) -> tuple[float, float]:
    """The loss, and its error as `Point` has it."""
    return judged.loss or 0.0, (judged.off or 0.0) / NORMAL_95


def _noise(points: Sequence[Point]) -> float:
    """Raises ResultError for points that cannot be fitted."""
    policies = {each.policy for each in points}
    if len(points) < FEWEST or len(policies) < FEWEST_POLICIES:
        found = f"{len(points)} live points of {len(policies)} policies that change the output"
        fix = "add sets to the file of --sets, and run the same quality command again"
        raise ResultError(f"{found}; a forecast needs {FEWEST} of {FEWEST_POLICIES}: {fix}")
    noise = middling_error(points)
    if noise <= 0:
        raise ResultError("the live points have no standard errors; ask a task of two examples or more")
    return noise


def middling_error(points: Sequence[Point]) -> float:
    """The noise of live points: the median of their standard errors."""
    return median(each.error for each in points)


def _chosen(kind: str, name: str | None, known: Sequence[str]) -> str:
    """The first if `name` is None. Raises ResultError for one that is not known, or where there is none."""
    if not known:
        raise ResultError(f"no {kind} with examples in these results; a forecast compares sets example by example")
    if name is not None and name not in known:
        raise unknown(kind, name, known)
    return name or known[0]


# -- How far a replay's mixtures are from the router's own, in six figures per configuration: what a forecast goes by.


class Change(NamedTuple):
    """What policies did to the mixtures of a run."""

    lost: float  #: gate weight that did not run as chosen, as a share, times that of an assignment of it, 1 on average
    variation: float  #: half |w - w'| between original and used mixture, of the gate weight; 0 to 1 and more
    substitution: float  #: gate weight in whose place another expert ran, as a share
    dropping: float  #: gate weight that nobody ran, as a share
    displacement: float  #: ranks between an assignment's expert and the slot that it fills, mean
    rounding: float  #: mean square of the error of rounding, that of one bit being 1


#: The counter behind each, as messages name it.
COUNTED = {
    "lost": "(mass - mass_kept)**2 per lost assignment",
    "variation": "variation / mass",
    "substitution": "mass_substituted / mass",
    "dropping": "mass_dropped / mass",
    "displacement": "rank_displacement / assignments",
    "rounding": "mass_low_precision and the bits of the miss policy",
}
#: Ratios that the figures are made of.
READ = (
    *("mass_share_kept", "choice_kept", "mean_variation", "mass_share_substituted", "mass_share_dropped"),
    *("mass_share_low_precision", "mean_displacement"),
)
NOTHING = Change(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def change_of(counters: Mapping[str, int | None], miss: str, stored: float) -> Change:
    """Of a run's totals under a miss policy in its full spelling, of a model stored at so many bits.

    Raises ResultError where a counter is missing or the trace has no gate weights.
    """
    found = {name: METRICS[name].value(counters) for name in READ}
    if None in found.values():
        raise ResultError("no gate weights were counted; replay a trace that has them with this version")
    kept, chosen, variation, substituted, dropped, low, ranks = (value or 0.0 for value in found.values())
    rounding = _rounding(low, 1 - dropped, tiers_of(miss), stored)
    return Change(_lost(1 - kept, 1 - chosen), variation, substituted, dropped, ranks, rounding)


def tiers_of(miss: str) -> Sequence[float]:
    """The precisions of a miss policy, best first, from its full spelling; 0 is as stored."""
    found = re.search(r":bits=([\d./]+)", miss)
    return [float(bits) for bits in found[1].split("/")] if found else [0.0]


def stored_bits(dtype: str) -> float:
    """Of the weights of a model in that type: 32 of `float32`, 4 of `bfloat16+bnb-4bit`."""
    found = re.search(r"\d+", dtype.rpartition("+")[2])
    return float(found[0]) if found else 16.0


def policy_of(config: Mapping[str, Any]) -> str:
    """The policies of a configuration that change what the model answers: `cache_prior`, `prune+drop`."""
    names = [config[kind].partition(":")[0] for kind in ("routing", "miss")]
    return "+".join(name for name in names if name not in ("standard", "fetch")) or "fetch"


def _lost(mass: float, assignments: float) -> float:
    """From the shares that did not run as chosen. Of one heavy expert it is more than of several light ones."""
    return mass * mass / assignments if assignments > 0 else 0.0


def _rounding(low: float, ran: float, tiers: Sequence[float], stored: float) -> float:
    """What ran below the first tier is taken to have run at the last: the counters do not say which it was."""
    return max(ran - low, 0.0) * _rounding_error(tiers[0], stored) + low * _rounding_error(tiers[-1], stored)


def _rounding_error(bits: float, stored: float) -> float:
    """Mean square of the error of rounding to 2**bits values, that of two values being 1."""
    return 0.0 if bits == 0 or bits >= stored else 1 / (2**bits - 1) ** 2


# -- A loss as a sum of rising terms of what policies change: a weight for each figure of `analysis/forecast.py`.

Array = NDArray[np.float64]
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


# -- How far a fit is off where it was not fitted: every live point forecast from the others.

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
    left = [Left(own, _answer_of(others[own.policy], own), None) for own in points]
    asked = [at for at, each in enumerate(left) if whole or each.by_others is None]
    for at in asked:
        rest = _fit([*points[:at], *points[at + 1 :]], form, noise)
        left[at] = left[at]._replace(by_rest=_answer_of(rest, points[at]))
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


def _answer_of(fit: Rising | None, point: Point) -> float | None:
    return None if fit is None or fit.refusal(point.change) else fit.at(point.change)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else inf
