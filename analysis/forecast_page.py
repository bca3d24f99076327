"""A forecast as text: what it rests on and how good it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, expm1, isinf
from statistics import median
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.forecast import (
    COUNTED,
    LARGEST_EXPONENT,
    LEVEL,
    NLL,
    Answer,
    Change,
    Forecast,
    Left,
    Point,
    Refusal,
    best_form,
    distance,
    distances,
    fitted,
    forecast,
    middling_error,
    reach_of,
)
from moereplay.analysis.statistics import spearman
from moereplay.analysis.tables import FORECAST as HEADS
from moereplay.analysis.tables import cell, counted, table
from moereplay.results.result import ResultError, Row


def page(made: Forecast) -> list[str]:
    """Lines for a terminal: what carries the signal, errors policy by policy, how often intervals held."""
    live = f"{len(made.points)} live points of {len({each.policy for each in made.points})} policies"
    errors = [{name: shown(made, value) for name, value in row.items()} for row in by_policy(made)]
    held = in_words(coverage(made.points))
    return [
        f"FORECAST: {made.model}, {made.dtype}; {made.task}, {made.measure}; from {live}",
        "",
        table(signal(made), _form(made), spare=["counter"], more="--json"),
        table(errors, "medians of |forecast - live|, each point forecast by the others", more="--json"),
        f"intervals of {LEVEL:.0%}: the loss times {exp(made.reach):.3g} either way where it is far above the noise "
        f"({cell(shown(made, made.fit.noise))}); {held}",
        "beyond what was measured, and of any other model, there is no forecast",
    ]


def document(made: Forecast) -> dict[str, Any]:
    """All of it and every live point, JSON-ready; losses in the measure's units."""
    named = {name: getattr(made, name) for name in ("model", "dtype", "task", "measure", "reach")}
    fit = {**made.fit.form._asdict(), "noise": made.fit.noise, "figures": signal(made)}
    held = coverage(made.points)._asdict()
    return named | fit | {"errors": by_policy(made), "coverage": held, "points": point_rows(made)}


def _form(made: Forecast) -> str:
    through = ", weights those of KL times one factor" if made.fit.form.through_kl else ""
    return f"loss = sum of weight * figure ** {made.fit.form.power:g}{through}"


# -- The forecast of every configuration of a sweep: a column of a results frame, which tables and figures take.

#: Column of a results frame: what is forecast of a configuration, or why nothing is.
COLUMN = "forecast"
SIDES = tuple(HEADS)
FIELDS: dict[str, Any] = dict.fromkeys(SIDES, pl.Float64) | {"refused": pl.String, "why": pl.String}


def of_perplexity(frame: pl.DataFrame) -> Forecast:
    """From a frame of `results.quality`, of its first task with `nll`. Raises ResultError where no task has it."""
    tasks = frame.explode("measures").filter(pl.col("measures").struct.field("name") == NLL)["task"]
    if tasks.is_empty():
        raise ResultError(f"no task of these results has {NLL}, so no perplexity to forecast; run perplexity:FILE live")
    return forecast(frame, tasks[0], NLL)


def with_forecasts(frame: pl.DataFrame, made: Forecast) -> pl.DataFrame:
    """A frame of `results.stored` with the column, of a forecast of `nll`.

    What ends beyond every number is refused: the live points say too little of it.
    """
    rows = frame.select("config", "about", "totals").iter_rows(named=True)
    found = [_answer_row(made.of(row["totals"], _miss(row), row["about"]["model"])) for row in rows]
    return frame.with_columns(pl.Series(COLUMN, found, dtype=pl.Struct(FIELDS)))


def within(frame: pl.DataFrame, most: float) -> pl.DataFrame:
    """The configurations whose interval ends at or below a change of perplexity. Raises ResultError where none does."""
    kept = frame.filter(pl.col(COLUMN).struct.field("high") <= most)
    if kept.is_empty():
        why = "; ".join([f"the smallest is {_smallest(frame)}", *refusals(frame)])
        raise ResultError(f"no configuration has a FORECAST loss within {most:.3%}, its interval included: {why}")
    return kept


def refusals(frame: pl.DataFrame) -> list[str]:
    """A line for each reason for which configurations have no forecast, with one of them as the example."""
    known = frame[COLUMN].struct.unnest().drop_nulls("refused")
    groups = (
        known.group_by("refused")
        .agg(pl.len().alias("count"), pl.col("why").first())
        .sort("count", "refused", descending=[True, False])
    )
    return [_in_words(**row) for row in groups.iter_rows(named=True)]


def columns(table: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """A table with a column `identity`, and beside it what is forecast; as it is where nothing was asked."""
    if COLUMN not in frame.columns:
        return table
    identity, found = pl.col("about").struct.field("identity"), pl.col(COLUMN).struct
    known = frame.select(identity, *(found.field(name).alias(head) for name, head in HEADS.items()))
    return table.join(known, on="identity", how="left", maintain_order="left")


def nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of such a table as a JSON object, what is forecast in one of its own."""
    if HEADS["loss"] not in row:
        return dict(row)
    return {name: value for name, value in row.items() if name not in HEADS.values()} | {
        COLUMN: {name: row[head] for name, head in HEADS.items()}
    }


def share_of(text: str) -> float:
    """A change of perplexity as users type it, 1% or, in nats, 0.02; as a share. Raises ResultError."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < 100:
        raise ResultError(f"--max-loss {text!r} is no loss; write 1% of perplexity, or 0.02 nats per token as 0.02")
    return number / 100 if text.endswith("%") else expm1(number)


def _in_words(refused: str, why: str, count: int) -> str:
    return (
        f"no FORECAST of {counted(count, 'configuration')}: {refused} (as here: {why}); run one of them live to have it"
    )


def _answer_row(answer: Answer) -> dict[str, Any]:
    if answer.high is not None and answer.high > LARGEST_EXPONENT:
        endless = f"it ends at {answer.high:.3g} nats per token"
        answer = Answer(refusal=Refusal("an interval without an end", endless))
    values = (answer.loss, answer.low, answer.high)
    shares = {name: None if value is None else expm1(value) for name, value in zip(SIDES, values, strict=True)}
    refusal = answer.refusal
    return shares | {"refused": refusal.kind if refusal else None, "why": refusal.why if refusal else None}


def _miss(row: Mapping[str, Any]) -> str:
    """In its full spelling; results of before had none."""
    return (row["about"]["policies"] or {}).get("miss") or row["config"]["miss"]


def _smallest(frame: pl.DataFrame) -> str:
    highest = frame[COLUMN].struct.field("high").drop_nulls()
    return f"{min(highest.to_list()):.3%}" if len(highest) else "of none"


# -- How good a forecast is, in figures: which counters carry it, its errors policy by policy, and how often it holds.


class Coverage(NamedTuple):
    """Of live points forecast by other policies, with intervals that these made."""

    inside: int
    asked: int
    refused: int


def coverage(points: Sequence[Point]) -> Coverage:
    """Every policy left out in turn, and all made anew by the others: noise, form, weights, width of the intervals."""
    found = [each for policy in dict.fromkeys(each.policy for each in points) for each in _without(points, policy)]
    asked = [each for each in found if each is not None]
    return Coverage(sum(asked), len(asked), len(found) - len(asked))


def signal(forecast: Forecast) -> list[Row]:
    """A row for each figure: how it ranks points beside their losses, its weight and share in them, and its range."""
    losses = [each.loss for each in forecast.points]
    terms = [forecast.fit.terms(each.change) for each in forecast.points]
    shares = [Change(*(value / (sum(each) or 1.0) for value in each)) for each in terms]
    return [
        {
            "figure": name,
            "counter": COUNTED[name],
            "rank correlation": spearman([getattr(each.change, name) for each in forecast.points], losses),
            "weight": getattr(forecast.fit.weights, name),
            "share of the loss": sum(getattr(each, name) for each in shares) / len(shares),
            "measured to": getattr(forecast.fit.most, name),
        }
        for name in Change._fields
    ]


def by_policy(forecast: Forecast) -> list[Row]:
    """A row for each policy, and one for all: medians over its points, in the measure's units."""
    groups = {name: [each for each in forecast.left if each.point.policy == name] for name in _policies(forecast)}
    return [_row(name, left) for name, left in (groups | {"all": list(forecast.left)}).items()]


def point_rows(forecast: Forecast) -> list[Row]:
    """A row for each live point: what was measured, what is forecast of it, and what others forecast."""
    return [_point(forecast, each) for each in forecast.left]


def in_words(held: Coverage) -> str:
    """How often the intervals held what was measured."""
    if not held.asked:
        none = f"none of {held.refused} points of policies that are left out has an interval by the others"
        return f"{none}: out of their reach, or they are too few; so it is not known how often intervals hold"
    share = f"{held.inside} of {held.asked} live points ({held.inside / held.asked:.0%})"
    return f"held {share} of policies that were left out, {held.refused} more were refused"


def shown(forecast: Forecast, value: Any) -> Any:
    """A value of a table for reading: a loss of `nll` is the change of perplexity in percent."""
    if forecast.measure != NLL or not isinstance(value, float):
        return value
    return f"{expm1(value):.2%}" if value <= LARGEST_EXPONENT else f"{value:.3g} nats"


def _point(forecast: Forecast, left: Left) -> Row:
    answer, own = forecast.at(left.point.change), left.point
    said = {"forecast": answer.loss, "low": answer.low, "high": answer.high}
    by = {"by_other_policies": left.by_others, "by_other_points": left.by_rest}
    return (
        {"set": own.set, "policy": own.policy, "live": own.loss, "error": own.error} | said | by | own.change._asdict()
    )


def _policies(forecast: Forecast) -> Sequence[str]:
    return list(dict.fromkeys(each.policy for each in forecast.points))


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


def _without(points: Sequence[Point], policy: str) -> Iterator[bool | None]:
    """Whether each point of a policy lies in the interval that the others make; None where they refuse it."""
    own, others = ([each for each in points if (each.policy == policy) is is_own] for is_own in (True, False))
    noise = middling_error(others) if others else 0.0
    if noise <= 0:  # nothing to compare errors with
        yield from (None for _ in own)
        return
    form, left = best_form(others, noise, whole=False)
    reach, fit = reach_of(distances(left, noise)), fitted(others, form, noise)
    for each in own:
        known = fit.refusal(each.change) is None and not isinf(reach)
        yield distance(each.loss, fit.at(each.change), noise) <= reach if known else None
