"""FORECAST: quality loss of policy sets that were not run live, from the fidelity counters of their replays.

Losses of a model's live points (`moereplay quality`) are fitted (`forecast_fit.py`). An interval is as wide as the
errors of leaving policies out: nine in ten live runs of as many examples lie inside. Another model, a kind of change
that no live point has, and a larger change than any live point has are refused.

Losses of replays are changes of perplexity as shares: 0.01 is one percent more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, isfinite, isinf, log
from statistics import median
from sys import float_info
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.forecast_fit import (
    COUNTED,
    LEVEL,
    Change,
    Left,
    Point,
    Refusal,
    Rising,
    best_form,
    change_of,
    distance,
    distances,
    fitted,
    moved,
    policy_of,
    reach_of,
    stored_bits,
)
from moereplay.analysis.quality import KL, NLL, Judged, judged, replayed
from moereplay.analysis.statistics import spearman
from moereplay.analysis.tables import FORECAST as HEADS
from moereplay.analysis.tables import cell, table
from moereplay.results.errors import ResultError, unknown
from moereplay.results.quality import UNMODIFIED
from moereplay.results.result import Row
from moereplay.traces.texts import counted

FEWEST, FEWEST_POLICIES = 9, 3  #: live points that a 90 % interval needs, and policies among them
LARGEST_EXPONENT = log(float_info.max)  #: nats whose perplexity overflows
NORMAL_95 = 1.96  #: standard errors in half a 95 % CI of many examples


class Answer(NamedTuple):
    """A forecast in the measure's units, or the reason why there is none."""

    loss: float | None = None
    low: float | None = None
    high: float | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Forecast:
    """A fit to the live points of one model, task and measure, for forecasts of other policy sets."""

    model: str
    dtype: str
    task: str
    measure: str
    points: Sequence[Point]
    fit: Rising
    left: Sequence[Left]  #: every point with its forecasts from other points
    reach: float  #: half an interval, on the scale of `forecast_fit.distance`

    def of(self, counters: Mapping[str, int | None], miss: str, model: str) -> Answer:
        """Forecast from the totals of a replay under a miss policy in its full spelling."""
        if model != self.model:
            why = f"the trace is of {model or 'an unnamed model'}, the live points are of {self.model}"
            return Answer(refusal=Refusal("another model", why))
        try:
            change = change_of(counters, miss, stored_bits(self.dtype))
        except ResultError as error:
            return Answer(refusal=Refusal("no gate weights", str(error)))
        return self.at(change)

    def at(self, change: Change) -> Answer:
        """Forecast the loss of a change; no change has no loss."""
        if refusal := self.fit.refusal(change):
            return Answer(refusal=refusal)
        if not any(change):
            return Answer(0.0, 0.0, 0.0)
        loss = self.fit.at(change)
        low, high = (moved(loss, by, self.fit.noise) for by in (-self.reach, self.reach))
        return Answer(loss, low, high)


def forecast(frame: pl.DataFrame, task: str | None = None, measure: str | None = None) -> Forecast:
    """Fit the first task and `nll` of a frame of `results.quality`, or the given task and measure.

    Raises ResultError for an unknown task or measure, and if live points are too few or too similar.
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
        raise ResultError("too few live points are within the range of the others; run policies at more strengths live")
    about = rows["about"][0]
    fit = fitted(points, form, noise)
    return Forecast(about["model"], about["dtype"], rows["task"][0], measure, points, fit, left, reach)


def of_perplexity(frame: pl.DataFrame) -> Forecast:
    """Fit the first task with `nll` in a frame of `results.quality`. Raises ResultError if no task has it."""
    tasks = frame.explode("measures").filter(pl.col("measures").struct.field("name") == NLL)["task"]
    if tasks.is_empty():
        raise ResultError(f"no task has {NLL}, which a forecast of perplexity needs; run the task perplexity:FILE live")
    return forecast(frame, tasks[0], NLL)


def points_of(rows: pl.DataFrame, found: Sequence[Judged], measure: str) -> list[Point]:
    """Return the live points of a task by one measure: sets that change the model's output."""
    losses = {each.set: _finite(each) for each in found if each.measure == measure}
    kl = {each.set: _measured(_finite(each)) for each in found if each.measure == KL != measure}
    live = rows.filter(pl.col("changes_output") & (pl.col("set") != UNMODIFIED))
    return [
        Point(
            row["set"],
            policy_of(row["config"]),
            change_of(*replayed(row)),
            *_measured(losses[row["set"]]),
            kl.get(row["set"]),
        )
        for row in live.iter_rows(named=True)
        if row["set"] in losses
    ]


def _finite(judged: Judged) -> Judged:
    """Raises ResultError if a loss is not finite, as after a float16 overflow."""
    if judged.change is not None and not isfinite(judged.change):
        found = f"invalid {judged.measure} loss of set {judged.set}: {judged.loss} is not finite"
        raise ResultError(f"{found}; run live in a wider --dtype, or remove the set from --sets")
    return judged


def _measured(judged: Judged) -> tuple[float, float]:
    return judged.loss or 0.0, (judged.off or 0.0) / NORMAL_95


def _noise(points: Sequence[Point]) -> float:
    """Return the noise of the points. Raises ResultError if they cannot be fitted."""
    policies = {point.policy for point in points}
    if len(points) < FEWEST or len(policies) < FEWEST_POLICIES:
        found = f"{len(points)} live points of {len(policies)} policies that change the output"
        fix = "add sets to the file of --sets, and run the same quality command again"
        raise ResultError(f"{found}; a forecast needs {FEWEST} of {FEWEST_POLICIES}: {fix}")
    noise = middling_error(points)
    if noise <= 0:
        raise ResultError("the live points have no standard errors; use a task with two examples or more")
    return noise


def middling_error(points: Sequence[Point]) -> float:
    """Return the noise of live points: the median of their standard errors."""
    return median(point.error for point in points)


def _chosen(kind: str, name: str | None, known: Sequence[str]) -> str:
    """Return `name`, or the first known one if it is None. Raises ResultError if it is unknown or none is known."""
    if not known:
        raise ResultError(f"no {kind} with per-example results; a forecast compares sets example by example")
    if name is not None and name not in known:
        raise unknown(kind, name, known)
    return name or known[0]


#: Column of a results frame: the forecast of a configuration, or why there is none.
COLUMN = "forecast"
SIDES = tuple(HEADS)
FIELDS: dict[str, Any] = dict.fromkeys(SIDES, pl.Float64) | {"refused": pl.String, "why": pl.String}


def with_forecasts(frame: pl.DataFrame, made: Forecast) -> pl.DataFrame:
    """Add the column of forecasts to a frame of `results.stored`; the forecast must be of `nll`.

    Forecasts whose interval exceeds every floating-point perplexity are refused.
    """
    rows = frame.select("config", "about", "totals").iter_rows(named=True)
    found = [_answer_row(made.of(row["totals"], _miss(row), row["about"]["model"])) for row in rows]
    return frame.with_columns(pl.Series(COLUMN, found, dtype=pl.Struct(FIELDS)))


def within(frame: pl.DataFrame, most: float) -> pl.DataFrame:
    """Keep configurations whose interval ends at or below a change of perplexity. Raises ResultError if none does."""
    kept = frame.filter(pl.col(COLUMN).struct.field("high") <= most)
    if kept.is_empty():
        highest = frame[COLUMN].struct.field("high").drop_nulls().to_list()
        smallest = f"{min(highest):.3%}" if highest else "of none"
        why = "; ".join([f"the smallest is {smallest}", *refusals(frame)])
        raise ResultError(f"no configuration has a FORECAST loss within {most:.3%}, including its interval: {why}")
    return kept


def refusals(frame: pl.DataFrame) -> list[str]:
    """Return a line per reason for missing forecasts, each with one example."""
    known = frame[COLUMN].struct.unnest().drop_nulls("refused")
    groups = (
        known.group_by("refused")
        .agg(pl.len().alias("count"), pl.col("why").first())
        .sort("count", "refused", descending=[True, False])
    )
    return [
        f"no FORECAST of {counted(row['count'], 'configuration')}: {row['refused']} (as here: {row['why']}); "
        "run one of them live to get it"
        for row in groups.iter_rows(named=True)
    ]


def forecast_columns(table: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """Add forecasts to a table with a column `identity`; unchanged if the frame has none."""
    if COLUMN not in frame.columns:
        return table
    identity, found = pl.col("about").struct.field("identity"), pl.col(COLUMN).struct
    known = frame.select(identity, *(found.field(name).alias(head) for name, head in HEADS.items()))
    return table.join(known, on="identity", how="left", maintain_order="left")


def nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of such a table as a JSON object, with its forecast as an inner object."""
    if HEADS["loss"] not in row:
        return dict(row)
    return {name: value for name, value in row.items() if name not in HEADS.values()} | {
        COLUMN: {name: row[head] for name, head in HEADS.items()}
    }


def share_of(text: str) -> float:
    """Parse a change of perplexity such as 1%, or 0.02 nats, into a share. Raises ResultError."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise ResultError(
            f"invalid --max-loss {text!r}: expected a share of perplexity such as 1%, or nats per token such as 0.02"
        )
    return number / 100 if text.endswith("%") else expm1(number)


def _answer_row(answer: Answer) -> dict[str, Any]:
    if answer.high is not None and answer.high > LARGEST_EXPONENT:
        endless = f"it ends at {answer.high:.3g} nats per token"
        answer = Answer(refusal=Refusal("an interval without an end", endless))
    values = (answer.loss, answer.low, answer.high)
    shares = {name: None if value is None else expm1(value) for name, value in zip(SIDES, values, strict=True)}
    refusal = answer.refusal
    return shares | {"refused": refusal.kind if refusal else None, "why": refusal.why if refusal else None}


def _miss(row: Mapping[str, Any]) -> str:
    """Return the full spelling of the miss policy, which older results lack."""
    return (row["about"]["policies"] or {}).get("miss") or row["config"]["miss"]


# Text and document of `forecast`


def page(made: Forecast) -> list[str]:
    """Return lines for a terminal: weights of the counters, errors by policy, and coverage of the intervals."""
    live = f"{len(made.points)} live points of {len({each.policy for each in made.points})} policies"
    errors = [{name: shown(made, value) for name, value in row.items()} for row in by_policy(made)]
    held, form = in_words(coverage(made.points)), made.fit.form
    through = ", weights those of KL times one factor" if form.through_kl else ""
    return [
        f"FORECAST: {made.model}, {made.dtype}; {made.task}, {made.measure}; from {live}",
        "",
        table(
            signal(made), f"loss = sum of weight * figure ** {form.power:g}{through}", spare=["counter"], more="--json"
        ),
        table(errors, "medians of |forecast - live|, each point forecast by the others", more="--json"),
        f"intervals of {LEVEL:.0%}: the loss times {exp(made.reach):.3g} either way where it is far above the noise "
        f"({cell(shown(made, made.fit.noise))}); {held}",
        "no forecast for changes beyond the measured range, or for another model",
    ]


def document(made: Forecast) -> dict[str, Any]:
    """Return the fit, its errors and every live point, JSON-ready; losses are in the measure's units."""
    named = {name: getattr(made, name) for name in ("model", "dtype", "task", "measure", "reach")}
    fit = {**made.fit.form._asdict(), "noise": made.fit.noise, "figures": signal(made)}
    held = coverage(made.points)._asdict()
    return (
        named
        | fit
        | {"errors": by_policy(made), "coverage": held, "points": [_point(made, left) for left in made.left]}
    )


def signal(made: Forecast) -> list[Row]:
    """Return a row per figure: rank correlation with the loss, weight, share of the loss, and measured range."""
    losses = [point.loss for point in made.points]
    terms = [made.fit.terms(point.change) for point in made.points]
    shares = [Change(*(value / (sum(term) or 1.0) for value in term)) for term in terms]
    return [
        {
            "figure": name,
            "counter": COUNTED[name],
            "rank correlation": spearman([getattr(point.change, name) for point in made.points], losses),
            "weight": getattr(made.fit.weights, name),
            "share of the loss": sum(getattr(share, name) for share in shares) / len(shares),
            "measured to": getattr(made.fit.most, name),
        }
        for name in Change._fields
    ]


def by_policy(made: Forecast) -> list[Row]:
    """Return a row per policy and one for all: medians over its points, in the measure's units."""
    policies = dict.fromkeys(point.policy for point in made.points)
    groups = {name: [left for left in made.left if left.point.policy == name] for name in policies}
    return [_row(name, left) for name, left in (groups | {"all": list(made.left)}).items()]


def in_words(held: Coverage) -> str:
    """Return the coverage as a sentence."""
    if not held.asked:
        none = f"none of {held.refused} left-out points has an interval from the other policies"
        return f"{none}, so the coverage is unknown"
    share = f"{held.inside} of {held.asked} live points ({held.inside / held.asked:.0%})"
    return f"covered {share} of left-out policies, {held.refused} more were refused"


def shown(made: Forecast, value: Any) -> Any:
    """Format a value for reading: a loss of `nll` becomes a change of perplexity in percent."""
    if made.measure != NLL or not isinstance(value, float):
        return value
    return f"{expm1(value):.2%}" if value <= LARGEST_EXPONENT else f"{value:.3g} nats"


def _point(made: Forecast, left: Left) -> Row:
    answer, own = made.at(left.point.change), left.point
    said = {"forecast": answer.loss, "low": answer.low, "high": answer.high}
    by = {"by_other_policies": left.by_others, "by_other_points": left.by_rest}
    return (
        {"set": own.set, "policy": own.policy, "live": own.loss, "error": own.error} | said | by | own.change._asdict()
    )


def _row(policy: str, left: Sequence[Left]) -> Row:
    by_others = [(each.point.loss, each.by_others) for each in left if each.by_others is not None]
    by_rest = [(each.point.loss, each.by_rest) for each in left if each.by_rest is not None]
    return {
        "policy": policy,
        "points": len(left),
        "live loss": median(each.point.loss for each in left),
        "error, policy left out": _middling(by_others),
        "refused": len(left) - len(by_others),
        "error, point left out": _middling(by_rest),
        "refused then": len(left) - len(by_rest),
    }


def _middling(pairs: Sequence[tuple[float, float]]) -> float | None:
    return median(abs(said - live) for live, said in pairs) if pairs else None


class Coverage(NamedTuple):
    """Counts of left-out points: inside their interval, forecast, and refused."""

    inside: int
    asked: int
    refused: int


def coverage(points: Sequence[Point]) -> Coverage:
    """Leave out every policy in turn, and repeat the whole fit on the others: noise, form, weights, interval width."""
    found = [each for policy in dict.fromkeys(point.policy for point in points) for each in _without(points, policy)]
    asked = [each for each in found if each is not None]
    return Coverage(sum(asked), len(asked), len(found) - len(asked))


def _without(points: Sequence[Point], policy: str) -> Iterator[bool | None]:
    """Tell for each point of a policy whether the interval from the others holds it; None if they refuse it."""
    own, others = ([point for point in points if (point.policy == policy) is is_own] for is_own in (True, False))
    noise = middling_error(others) if others else 0.0
    if noise <= 0:  # errors have no scale
        yield from (None for _ in own)
        return
    form, left = best_form(others, noise, whole=False)
    reach, fit = reach_of(distances(left, noise)), fitted(others, form, noise)
    for each in own:
        known = fit.refusal(each.change) is None and not isinf(reach)
        yield distance(each.loss, fit.at(each.change), noise) <= reach if known else None
