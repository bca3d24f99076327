"""Ratios and times over frames of results, derived when read (`results/result.py` defines them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl

from moereplay.analysis.comparisons import PARTS, READ, estimate
from moereplay.analysis.verdict import ALIKE, CONDITIONS, Entry, lines
from moereplay.results.counters import BY_LAYER, DECODE, DECODED, ENERGY, PHASE, expressions
from moereplay.results.errors import unknown
from moereplay.results.read import fields, routings, runs
from moereplay.results.remarks import synthetic_of
from moereplay.results.result import DOCUMENTED, METRICS, RANKED, RATIOS, TIMES, ranking_column
from moereplay.results.schema import fields_of
from moereplay.results.serving import figures
from moereplay.results.settings import POLICIES, SETTINGS, bare_names
from moereplay.traces.units import MS

LOW, HIGH, WHY = "_low", "_high", "_why"  #: end the columns of an interval, and of why there is none
LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms")  #: shown of configurations with arrivals
DEFAULTS = {setting.name: setting.default for setting in SETTINGS}
#: Said of a table even at their defaults.
ALWAYS = ("model", "trace", *POLICIES, "platform", "passes")
SAID = (*ALWAYS, *DEFAULTS)
#: Settings that verdicts read even where all configurations share them, and the figures that they are on.
NAMING = (*ALIKE, *CONDITIONS, *POLICIES, "reset")
JUDGED = ("tokens_per_s", "tpot_ms", "hit_rate")


def with_ratios(tidy: pl.DataFrame) -> pl.DataFrame:
    """Add to a tidy frame (`runs`, `layers` or `requests`) every ratio of `RATIOS` whose counters it has."""
    return _with_metrics(tidy, RATIOS)


def measured(frame: pl.DataFrame, figures: Sequence[str] = ()) -> pl.DataFrame:
    """Return one tidy row per configuration with every metric of `DOCUMENTED`; null where nothing was timed.

    Intervals of `figures` are columns too (`with_ends`).
    """
    ends = _ends(frame, figures)
    summed = DECODE in frame.columns
    known = summed or PHASE[0] in fields_of(frame.schema.get("per_layer"))  # neither where no platform has watts
    facts = fields_of(frame.schema["about"]) if known else ()
    derived = [*_times(frame), *expressions(facts, summed)]
    tidy = runs(frame).with_columns(*frame.select(derived).get_columns(), *ends)
    limit = 1 - pl.when(pl.col("bound_accesses") != 0).then(pl.col("bound_compulsory") / pl.col("bound_accesses"))
    made = _with_metrics(tidy, [name for name in DOCUMENTED if name in METRICS and name not in tidy.columns])
    return made.with_columns(limit.alias("compulsory_limit")).drop(*TIMES, ENERGY, DECODED, strict=False)


def figures_of(frame: pl.DataFrame) -> dict[str, float | None]:
    """Return every metric of `DOCUMENTED` for the one configuration of a frame; None where undefined."""
    return measured(frame).select(*DOCUMENTED).row(0, named=True)


def ranked(frame: pl.DataFrame, by: str, ends: bool = False) -> pl.DataFrame:
    """Rank configurations by one figure: identity, varying settings, and the columns of `RANKED`.

    With `ends`, intervals follow their columns (`with_ends`). Raises ResultError if `by` is not one
    of those columns.
    """
    by = ranking_column(by)
    known = [figure for figure in RANKED if figure in PARTS] if ends else []
    table = measured(frame, known)
    varying = [field for field in fields(frame) if table[field].n_unique() > 1]
    order = table.sort(by, "identity", descending=[RANKED[by], False], nulls_last=True)
    return order.select("identity", *varying, *RANKED, *(f"{figure}{end}" for figure in known for end in (LOW, HIGH)))


def with_latencies(ranking: pl.DataFrame, frame: pl.DataFrame, every: bool = False) -> pl.DataFrame:
    """Add the serving figures of configurations whose requests arrive over time; unchanged if there are none.

    Columns are `LATENCIES`, or with `every` all of `results/serving.py`; null without arrivals or rows of requests.
    """
    kept = runs(frame).select("identity").with_columns(frame["per_request"]) if "per_request" in frame.columns else None
    if kept is None or "arrivals" not in fields(frame):
        return ranking
    arrivals = dict(runs(frame).select("identity", "arrivals").iter_rows())
    rows = [
        {"identity": identity} | figures(requests)
        for identity, requests in kept.iter_rows()
        if requests and (arrivals[identity] or DEFAULTS["arrivals"]) != DEFAULTS["arrivals"]
    ]
    if not rows:
        return ranking
    found = pl.DataFrame(rows).drop("requests")
    return ranking.join(
        found if every else found.select("identity", *LATENCIES), "identity", "left", maintain_order="left"
    )


def with_ends(frame: pl.DataFrame, table: pl.DataFrame, figures: Sequence[str]) -> pl.DataFrame:
    """Return a table of the frame's configurations, in their order, with the 95 % interval of each figure.

    The columns `FIGURE_low` and `FIGURE_high` are null where requests do not give an interval.
    """
    return table.with_columns(_ends(frame, figures))


def with_layer_ends(frame: pl.DataFrame, table: pl.DataFrame, figure: str, phase: str) -> pl.DataFrame:
    """Return a table by `identity` and `layer` with the interval of a figure in one phase, or in `both`.

    The columns are those of `with_ends`, and `FIGURE_why`: why requests give none; all null where none were stored.
    """
    found = [row for at in range(len(frame)) for row in _of_layers(frame, at, figure, phase)]
    names = [f"{figure}{end}" for end in (LOW, HIGH, WHY)]
    kinds = (pl.String, table.schema["layer"], pl.Float64, pl.Float64, pl.String)
    ends = pl.DataFrame(found, dict(zip(("identity", "layer", *names), kinds, strict=True)), orient="row")
    return table.join(ends, on=["identity", "layer"], how="left", maintain_order="left")


def _of_layers(frame: pl.DataFrame, at: int, figure: str, phase: str) -> Iterator[tuple[Any, ...]]:
    """Yield identity, layer, ends and reason of the interval of each layer of a configuration."""
    requests = {row["request"]: row for row in samples(frame, at)}
    kept = frame["per_request_layer"][at] if requests and "per_request_layer" in frame.columns else None
    if kept is None:
        return
    rows = kept.struct.unnest()
    rows = rows if phase == "both" else rows.filter(pl.col("phase") == phase)
    counters = [name for name in BY_LAYER if name in rows.columns]
    sums = rows.group_by("layer", "request", maintain_order=True).agg(pl.col(counters).sum())
    for (layer,), own in sums.group_by("layer", maintain_order=True):
        found = estimate([requests[row["request"]] | row for row in own.iter_rows(named=True)], figure)
        if found is not None:
            alone = f"one request at most has {METRICS[figure].over[0]}, or lacks them" if found.low is None else None
            yield frame["about"][at]["identity"], layer, found.low, found.high, found.why or alone


def _ends(frame: pl.DataFrame, figures: Sequence[str]) -> list[pl.Series]:
    requests = [samples(frame, at) for at in range(len(frame))] if figures else []
    intervals = {figure: [estimate(rows, figure) for rows in requests] for figure in figures}
    return [
        pl.Series(f"{figure}{end}", [interval and getattr(interval, end[1:]) for interval in own], dtype=pl.Float64)
        for figure, own in intervals.items()
        for end in (LOW, HIGH)
    ]


def judged(frame: pl.DataFrame, foresees: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> list[str]:
    """Describe the best configurations of a frame in words (`analysis/verdict.py`).

    `foresees` maps a kind of policy to whether a row's policy knows the future.
    """
    return lines(entries(frame, foresees), varying(frame))


def varying(frame: pl.DataFrame) -> list[str]:
    """Return the settings by which the configurations of a frame are called: those that not all share."""
    table = runs(frame)
    return [field for field in fields(frame) if field != "trace" and table[field].n_unique() > 1]


def entries(frame: pl.DataFrame, foresees: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> list[Entry]:
    """Return the configurations of a frame as `analysis/verdict.py` judges them, by identity."""
    table = measured(frame)
    alike = [name for name in fields(frame) if name not in NAMING and table[name].n_unique() == 1]
    kept = [name for name in (*fields(frame), "identity", "capacity_bytes", *JUDGED) if name not in alike]
    bare = {kind: bare_names(table[kind].unique().to_list()) for kind in POLICIES}
    made = [bool(synthetic_of(about)) for about in routings(frame).iter_rows(named=True)]
    rows = table.select(kept).with_row_index("at").sort("identity").iter_rows(named=True)
    return [
        Entry(
            row | {kind: names[row[kind]] for kind, names in bare.items()},
            row["tokens_per_s"],
            row["hit_rate"],
            partial(rows_of, frame, row["at"]),
            foresees(row),
            made[row["at"]],
        )
        for row in rows
    ]


def shared(frame: pl.DataFrame) -> str:
    """Return the settings that all configurations share, in words; defaults of policies and `ALWAYS` only."""
    table = runs(frame)
    alike = {name: table[name][0] for name in fields(frame) if name in SAID and table[name].n_unique() == 1}
    alike |= {name: str(digest)[:12] for name, digest in alike.items() if name == "trace"}
    said = {name: value for name, value in alike.items() if name in ALWAYS or value not in (DEFAULTS[name], "", None)}
    return "; ".join(f"{name} {value}" for name, value in said.items())


def samples(frame: pl.DataFrame, at: int) -> list[dict[str, Any]]:
    """Return the request rows of a configuration, from which intervals are computed.

    None if they were not stored, or for synthetic routing, whose spread is only that of its generator.
    """
    return [] if synthetic_of(routings(frame).row(at, named=True)) else rows_of(frame, at)


def rows_of(frame: pl.DataFrame, at: int) -> list[dict[str, Any]]:
    """Return the request rows that comparisons of a configuration need; empty if they were not stored."""
    kept = frame["per_request"][at]
    if kept is None or not len(kept):
        return []
    return [{name: row[name] for name in READ if name in row} for row in kept.to_list()]


def grouped(frame: pl.DataFrame, settings: Sequence[str], by: str) -> pl.DataFrame:
    """Return means over configurations that share settings, best group first, with the group sizes.

    Models stay apart, and traces whose models have one name and several sizes. Raises ResultError for a setting or a
    figure that does not exist.
    """
    by, keys = ranking_column(by), _keys(frame, settings)
    means = measured(frame).group_by(keys).agg(pl.len().alias("configurations"), pl.col(*RANKED).mean())
    return means.sort(by, *keys, descending=[RANKED[by], *[False] * len(keys)], nulls_last=True)


def averaged(frame: pl.DataFrame, settings: Sequence[str]) -> str:
    """Return what differs within the groups of `grouped`, in words: `means over capacity (3), passes (2)`."""
    table, keys = runs(frame), _keys(frame, settings)
    most = table.group_by(keys).agg(pl.col(name).n_unique() for name in fields(frame) if name not in keys).max()
    over = [f"{name} ({most[name][0]})" for name in most.columns if name not in keys and most[name][0] > 1]
    return f"means over {', '.join(over)}" if over else ""


def _keys(frame: pl.DataFrame, settings: Sequence[str]) -> list[str]:
    """Return the columns that groups are made by: the settings, after what keeps models of different sizes apart."""
    for setting in settings:
        if setting not in fields(frame):
            raise unknown("configuration field", setting, fields(frame))
    table = runs(frame)
    sizes = table.group_by("model", "capacity").agg(pl.col("capacity_bytes").n_unique())["capacity_bytes"]
    several = {"model": table["model"].n_unique() > 1, "trace": max(sizes) > 1}
    return list(dict.fromkeys([*(name for name, differ in several.items() if differ), *settings]))


def _with_metrics(tidy: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Add the metrics whose counters are columns of the frame."""
    known = set(tidy.columns)
    fed = {name: METRICS[name] for name in names if {*METRICS[name].over, *METRICS[name].under} <= known}
    return tidy.with_columns(metric.expression().alias(name) for name, metric in fed.items())


def _times(frame: pl.DataFrame) -> list[pl.Expr]:
    """Return the sums `TIMES` and the median TTFT from request rows; aggregated rows hold means."""
    if "latency" in frame.columns:
        kept = pl.col("latency").struct
        means = [(kept.field(f"ttft_{kind}_ns") / MS).alias(f"ttft_{kind}_ms") for kind in ("mean", "median")]
        return [*means, kept.field("decode_ns"), kept.field("decode_tokens")]

    def each(name: str) -> pl.Expr:
        return pl.col("per_request").list.eval(pl.element().struct.field(name).drop_nulls())

    first = each("ttft_ns")
    sums = (first.list.sum(), first.list.len(), each("decode_ns").list.sum(), each("decode_tokens").list.sum())
    median = (first.list.median() / MS).alias("ttft_median_ms")
    return [*(total.alias(name) for name, total in zip(TIMES, sums, strict=True)), median]
