"""FORECAST: quality loss of policy sets that were not run live, from the fidelity counters of their replays.

Losses of a model's live points (`moereplay quality`) are fitted (`forecast_fit.py`). An interval is as wide as the
errors of leaving policies out: nine in ten live runs of as many examples lie inside. Another model, a kind of change
that no live point has, and a larger change than any live point has are refused.

Losses of replays are changes of perplexity as shares: 0.01 is one percent more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1, isfinite, isinf, log
from statistics import median
from sys import float_info
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.forecast_fit import (
    Change,
    Left,
    Point,
    Refusal,
    Rising,
    best_form,
    change_of,
    distances,
    fitted,
    moved,
    policy_of,
    reach_of,
    stored_bits,
)
from moereplay.analysis.quality import KL, NLL, Judged, judged, replayed
from moereplay.analysis.tables import FORECAST as HEADS
from moereplay.results.errors import ResultError, unknown
from moereplay.results.quality import UNMODIFIED
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
    policies = {each.policy for each in points}
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
    return median(each.error for each in points)


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
