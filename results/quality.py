"""The file of `quality --out`: a row per task and policy set, with the model's answers to each example.

`quality.parquet` has nested rows, `examples.parquet` a flat row for every example and measure, so that sets can be
compared in pairs. The set `unmodified` is the model without policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from moereplay.results.counters import COUNTERS
from moereplay.results.errors import ResultError
from moereplay.results.files import check_columns, check_digests, read_rows
from moereplay.results.result import Result, Row, request_times
from moereplay.results.schema import BOUNDS, DTYPES, ROWS_VERSION, with_config, with_digests
from moereplay.results.settings import setting_kinds
from moereplay.traces.texts import typed

FILE = "quality.parquet"
EXAMPLES = "examples.parquet"
UNMODIFIED = "unmodified"
#: Inputs of TTFT and TPOT: sums over requests, in addition to a run's counters.
TIMES = ("ttft_ns", "ttft_requests", "decode_ns", "decode_passes")  #: a live model decodes one token per pass
_COUNTED = pl.Struct(dict.fromkeys((*COUNTERS, "time_ns", *TIMES), pl.Int64))
_ABOUT = ("model", "weights_sha256", "dtype", "trace", "task_sha256", "evaluator", "device", "policies", "alone")
_MEASURE = {"name": pl.String, "value": pl.Float64, "higher_is_better": pl.Boolean}
#: `weight` is the example's weight in the mean: tokens or words of a perplexity, else 1.
_EXAMPLE = {"example": pl.String, "prompt_sha256": pl.String, "measure": pl.String} | {
    "value": pl.Float64,
    "weight": pl.Float64,
}
SCHEMA: dict[str, Any] = {
    "rows_version": pl.Int64,
    "set": pl.String,
    "task": pl.String,
    "changes_output": pl.Boolean,
    "config": pl.Struct({name: DTYPES[kind] for name, kind in setting_kinds().items()}),  # null of `unmodified`
    "about": pl.Struct(dict.fromkeys(_ABOUT, pl.String) | {"batch": pl.Int64, "seed": pl.Int64}),
    "texts": pl.Int64,
    "tokens": pl.Int64,
    "live": _COUNTED,  # effects of the policies on this model; null for `unmodified`
    "replayed": _COUNTED,  # what a replay of the unmodified model's trace says, as a sweep would
    "bounds": pl.Struct(BOUNDS),  # of that replay; null where routing changes the demand
    "measures": pl.List(pl.Struct(_MEASURE)),
    "examples": pl.List(pl.Struct(_EXAMPLE)),
}
NEEDED = {name: [field.name for field in kind.fields] for name, kind in SCHEMA.items() if name in ("about", "live")}


def counted(totals: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> Row:
    """Return the field `live` or `replayed` from a run's totals and its rows of requests."""
    times = dict(zip(TIMES, request_times(requests).values(), strict=True))
    return {name: totals[name] for name in (*COUNTERS, "time_ns")} | times


def counted_by(result: Result) -> Row:
    """Return `counted` of a replay."""
    return counted(result.totals, result.per_request)


def to_frame(rows: Sequence[Row]) -> pl.DataFrame:
    """Return rows as a frame with the columns of `SCHEMA` and a digest."""
    return with_digests(pl.DataFrame([{"rows_version": ROWS_VERSION} | row for row in rows], schema=SCHEMA))


def examples_of(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a flat row for every set, task, example and measure."""
    return frame.select("set", "task", "examples").explode("examples").unnest("examples")


def load(folder: Path) -> pl.DataFrame:
    """Return the rows of a folder, with the unmodified model's of every task.

    Raises ResultError if there are none, or if the file is damaged, foreign or lacks the unmodified model.
    """
    if not (folder / FILE).exists():
        make = f"moereplay quality MODEL --sets SETS --tasks TASKS --out {typed(folder)}"
        raise ResultError(f"no results of `quality` in {folder}; make some with: {make}")
    frame = read(folder / FILE)
    judged = frame.filter(pl.col("set") == UNMODIFIED)["task"]
    if without := sorted({*frame["task"]} - {*judged}):
        lacks = f"{folder / FILE} has no row of {UNMODIFIED!r} in task {without[0]}, to judge the others by"
        raise ResultError(f"{lacks}; run the same quality command again")
    return frame


def read(path: Path) -> pl.DataFrame:
    """Return the rows of one file. Raises ResultError if it is damaged or foreign."""
    frame = read_rows(path, "quality")
    check_columns(path, frame.schema, NEEDED)
    check_digests(path, frame, "quality")
    has_config = pl.col("set") != UNMODIFIED  # unnesting makes fields of a config that is not there
    return with_config(frame).with_columns(pl.when(has_config).then(pl.col("config")))
