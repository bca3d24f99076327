"""The forecast of every configuration of a sweep: a column of a results frame, which tables and figures take.

Losses are changes of perplexity here, as shares: 0.01 is one percent more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import expm1
from typing import Any

import polars as pl

from moereplay.analysis.forecast import LARGEST_EXPONENT, NLL, Answer, Forecast, forecast
from moereplay.analysis.rising import Refusal
from moereplay.analysis.short import FORECAST as HEADS
from moereplay.analysis.tables import counted
from moereplay.results.result import ResultError

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
    found = [_row(made.of(row["totals"], _miss(row), row["about"]["model"])) for row in rows]
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


def _row(answer: Answer) -> dict[str, Any]:
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
