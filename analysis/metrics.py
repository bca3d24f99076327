"""Ratios and times over frames of results, derived when read (`analysis/ratios.py` defines them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl

from moereplay.analysis.comparisons import PARTS, READ, estimate
from moereplay.analysis.ratios import FORMULAS, RANKED, RATIOS
from moereplay.analysis.sentences import lines
from moereplay.analysis.verdict import Entry
from moereplay.results.read import fields, runs
from moereplay.results.remarks import synthetic_of
from moereplay.results.result import unknown
from moereplay.results.settings import POLICIES, SETTINGS, bare_names

LOW, HIGH = "_low", "_high"  #: end the columns of an interval
DEFAULTS = {each.name: each.default for each in SETTINGS}
#: Said of a table even at their defaults.
ALWAYS = ("model", "trace", *POLICIES, "platform", "passes")
SAID = (*ALWAYS, *DEFAULTS)


def with_ratios(tidy: pl.DataFrame) -> pl.DataFrame:
    """A tidy frame (`runs`, `layers` or `requests`) and every ratio of `RATIOS` whose counters it has."""
    fed = {name: ratio for name, ratio in RATIOS.items() if {*ratio.over, *ratio.under} <= set(tidy.columns)}
    return tidy.with_columns(
        _quotient(_total(ratio.over), _total(ratio.under)).alias(name) for name, ratio in fed.items()
    )


def measured(frame: pl.DataFrame) -> pl.DataFrame:
    """One tidy row per configuration with every metric of `FORMULAS`; times in ms, null where nothing was timed."""
    return with_ratios(runs(frame)).with_columns(
        (1 - _quotient(pl.col("bound_compulsory"), pl.col("bound_accesses"))).alias("compulsory_limit"),
        ((pl.col("bytes_demand") + pl.col("bytes_prefetch")) / 1e9).alias("gb_moved"),
        (pl.col("bytes_lower") / 1e9).alias("gb_lower"),
        *frame.select(_latencies(frame)).get_columns(),
    )


def figures_of(frame: pl.DataFrame) -> dict[str, float | None]:
    """Every metric of `FORMULAS` for the one configuration of a frame; null where undefined."""
    return measured(frame).select(*FORMULAS).row(0, named=True)


def ranked(frame: pl.DataFrame, by: str, ends: bool = False) -> pl.DataFrame:
    """Every configuration, the best by one figure first: its identity, what varies, and the columns of `RANKED`.

    With `ends` the intervals of those that have one stand behind them (`with_ends`). Raises ResultError if `by` is none
    of those columns.
    """
    if by not in RANKED:
        raise unknown("ranking column", by, RANKED)
    table = measured(frame)
    varying = [field for field in fields(frame) if table[field].n_unique() > 1]
    known = [figure for figure in RANKED if figure in PARTS] if ends else []
    order = with_ends(frame, table, known).sort(by, "identity", descending=[RANKED[by], False], nulls_last=True)
    return order.select("identity", *varying, *RANKED, *(f"{figure}{end}" for figure in known for end in (LOW, HIGH)))


def with_ends(frame: pl.DataFrame, table: pl.DataFrame, figures: Sequence[str]) -> pl.DataFrame:
    """Return a table of the frame's configurations, in their order, with the 95 % interval of each figure.

    The columns `FIGURE_low` and `FIGURE_high` are null where requests do not give an interval.
    """
    kept = [samples(frame, at) for at in range(len(frame))]
    found = [[estimate(rows, figure) for rows in kept] for figure in figures]
    return table.with_columns(
        pl.Series(f"{figure}{end}", [_end(each and getattr(each, end[1:]), figure) for each in own], dtype=pl.Float64)
        for figure, own in zip(figures, found, strict=True)
        for end in (LOW, HIGH)
    )


def _end(value: float | None, figure: str) -> float | None:
    """No share is above 1."""
    return min(value, 1.0) if figure == "hit_rate" and value is not None else value


def judged(frame: pl.DataFrame, foresees: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> list[str]:
    """The best configurations of a frame in words (`analysis/verdict.py`).

    `foresees` says whether the policies of a row know the future, by kind.
    """
    return lines(entries(frame, foresees), varying(frame))


def varying(frame: pl.DataFrame) -> list[str]:
    """The settings by which the configurations of a frame are called: those that not all share."""
    table = runs(frame)
    return [field for field in fields(frame) if field != "trace" and table[field].n_unique() > 1]


def entries(frame: pl.DataFrame, foresees: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> list[Entry]:
    """The configurations of a frame as `analysis/verdict.py` judges them, by identity."""
    table = measured(frame).select(*fields(frame), "identity", "capacity_bytes", "tokens_per_s", "tpot_ms", "hit_rate")
    bare = {kind: bare_names(table[kind].unique().to_list()) for kind in POLICIES}
    rows = table.with_row_index("at").sort("identity").iter_rows(named=True)
    return [
        Entry(
            row | {kind: names[row[kind]] for kind, names in bare.items()},
            row["tokens_per_s"],
            row["hit_rate"],
            partial(samples, frame, row["at"]),
            foresees(row),
            bool(synthetic_of(frame["about"][row["at"]])),
            partial(rows_of, frame, row["at"]),
        )
        for row in rows
    ]


def shared(frame: pl.DataFrame) -> str:
    """The settings that all configurations have alike, in words; a default is said of policies and `ALWAYS` alone."""
    table = runs(frame)
    alike = {name: table[name][0] for name in fields(frame) if name in SAID and table[name].n_unique() == 1}
    alike |= {name: str(digest)[:12] for name, digest in alike.items() if name == "trace"}
    said = {name: value for name, value in alike.items() if name in ALWAYS or value not in (DEFAULTS[name], "", None)}
    return "; ".join(f"{name} {value}" for name, value in said.items())


def samples(frame: pl.DataFrame, at: int) -> list[dict[str, Any]]:
    """Return the rows of requests of a configuration, of which intervals are made.

    None where a sweep did not keep them, and none of synthetic routing, whose spread is that of its generator.
    """
    return [] if synthetic_of(frame["about"][at]) else rows_of(frame, at)


def rows_of(frame: pl.DataFrame, at: int) -> list[dict[str, Any]]:
    """Return the rows of requests of a configuration, what comparisons read of them; none where none are kept."""
    kept = frame["per_request"][at]
    if kept is None or not len(kept):
        return []
    rows = kept.struct.unnest()
    return rows.select(name for name in READ if name in rows.columns).to_dicts()


def grouped(frame: pl.DataFrame, settings: Sequence[str], by: str) -> pl.DataFrame:
    """Means over the configurations that share some settings, best group first, with how many they are.

    Raises ResultError for a setting or a figure that does not exist.
    """
    for setting in settings:
        if setting not in fields(frame):
            raise unknown("configuration field", setting, fields(frame))
    if by not in RANKED:
        raise unknown("ranking column", by, RANKED)
    means = measured(frame).group_by(settings).agg(pl.len().alias("configurations"), pl.col(*RANKED).mean())
    return means.sort(by, *settings, descending=[RANKED[by], *[False] * len(settings)], nulls_last=True)


def _latencies(frame: pl.DataFrame) -> list[pl.Expr]:
    """From the rows of requests, or from what a sweep kept of them."""
    if "latency" in frame.columns:
        kept = pl.col("latency").struct
        decode_ns, passes = kept.field("decode_ns"), kept.field("decode_passes")
        means = [(kept.field(f"ttft_{kind}_ns") / 1e6).alias(f"ttft_{kind}_ms") for kind in ("mean", "median")]
        return means + _decoding(decode_ns, passes)

    def each(name: str) -> pl.Expr:
        return pl.col("per_request").list.eval(pl.element().struct.field(name).drop_nulls())

    first, decode_ns, passes = each("ttft_ns"), each("decode_ns").list.sum(), each("decode_passes").list.sum()
    return [
        (first.list.mean() / 1e6).alias("ttft_mean_ms"),
        (first.list.median() / 1e6).alias("ttft_median_ms"),
        *_decoding(decode_ns, passes),
    ]


def _decoding(decode_ns: pl.Expr, passes: pl.Expr) -> list[pl.Expr]:
    return [
        (_quotient(decode_ns, passes) / 1e6).alias("tpot_ms"),
        (_quotient(passes, decode_ns) * 1e9).alias("tokens_per_s"),
    ]


def _total(names: tuple[str, ...]) -> pl.Expr:
    return pl.sum_horizontal(names, ignore_nulls=False)


def _quotient(over: pl.Expr, under: pl.Expr) -> pl.Expr:
    return pl.when(under != 0).then(over / under)
