"""FORECAST: quality loss of policy sets that were not run live, from the fidelity counters of their replays.

Some live points of a model (`moereplay quality`) are fitted by a sum of rising terms (`analysis/rising.py`): no change
costs nothing, and more of a figure never costs less. An interval is as wide as what leaving policies out found
(`analysis/left_out.py`): a live run of as many examples lies in it nine times in ten. What was not measured is refused:
another model, a kind of change of which no live point has any, and more of one than the live points have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isinf, log
from statistics import median
from sys import float_info
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.changes import Change, change_of, policy_of, stored_bits
from moereplay.analysis.left_out import Left, best_form, distances, reach_of
from moereplay.analysis.quality import Judged, judged
from moereplay.analysis.rising import Point, Refusal, Rising, fitted, moved
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
