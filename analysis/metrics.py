"""Ratios and times, derived when read. A ratio whose denominator is zero is null, never zero or infinite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from results.errors import unknown
from results.read import fields, runs


@dataclass(frozen=True)
class Ratio:
    """A sum of counters over a sum of counters."""

    over: tuple[str, ...]
    under: tuple[str, ...]

    @property
    def formula(self) -> str:
        """The ratio as text, for documentation: hits / accesses."""
        parts = [" + ".join(side) for side in (self.over, self.under)]
        return " / ".join(f"({part})" if "+" in part else part for part in parts)

    @property
    def value(self) -> pl.Expr:
        """f64, null where the denominator is zero."""
        return _quotient(_total(self.over), _total(self.under))


#: Ratios of totals, of a layer or of a request: every tidy frame with these columns can have them.
RATIOS: dict[str, Ratio] = {
    "hit_rate": Ratio(("hits",), ("accesses",)),
    "late_rate": Ratio(("late",), ("accesses",)),
    "collisions_per_miss": Ratio(("collisions",), ("misses",)),
    "collisions_per_access": Ratio(("collisions",), ("accesses",)),
    "prefetch_precision": Ratio(("prefetch_used",), ("prefetch_started",)),
    "prefetch_recall": Ratio(("prefetch_used",), ("prefetch_used", "misses")),
    "predictor_precision": Ratio(("predicted_demanded",), ("predicted",)),
    "predictor_recall": Ratio(("predicted_demanded",), ("predictable",)),
    "wasted_share": Ratio(("bytes_wasted",), ("bytes_prefetch",)),
    "choice_kept": Ratio(("assignments_kept",), ("assignments",)),
    "mass_share_kept": Ratio(("mass_kept",), ("mass",)),
    "mass_share_substituted": Ratio(("mass_substituted",), ("mass",)),
    "mass_share_dropped": Ratio(("mass_dropped",), ("mass",)),
    "mass_share_low_precision": Ratio(("mass_low_precision",), ("mass",)),
    "mean_displacement": Ratio(("rank_displacement",), ("assignments",)),
    "mean_variation": Ratio(("variation",), ("mass",)),
    "stall_share": Ratio(("stall_ns",), ("time_ns",)),
    "belady_hit_rate": Ratio(("bound_belady_hits",), ("bound_accesses",)),
}
#: Metrics that are no plain ratio of sums, for the same documentation.
FORMULAS: dict[str, str] = {name: ratio.formula for name, ratio in RATIOS.items()} | {
    "compulsory_limit": "1 - bound_compulsory / bound_accesses: no cache without prefetch hits more",
    "ttft_mean_ms": "mean over requests of request start to the end of its prefill",
    "ttft_median_ms": "median over requests of the same",
    "tpot_ms": "sum of decode_ns / sum of decode_passes, over requests",
    "tokens_per_s": "sum of decode_passes / sum of decode_ns: a decode pass makes one token",
    "gb_moved": "(bytes_demand + bytes_prefetch) / 1e9",
}
#: The numbers of the ranking, best first when sorted in this direction: True is "larger is better".
RANKED: dict[str, bool] = {
    "hit_rate": True,
    "belady_hit_rate": True,
    "compulsory_limit": True,
    "collisions_per_miss": False,
    "ttft_mean_ms": False,
    "tpot_ms": False,
    "tokens_per_s": True,
    "gb_moved": False,
}


def with_ratios(tidy: pl.DataFrame) -> pl.DataFrame:
    """A tidy frame (`runs`, `layers` or `requests`) and every ratio of `RATIOS` whose counters it has."""
    fed = {name: ratio for name, ratio in RATIOS.items() if {*ratio.over, *ratio.under} <= set(tidy.columns)}
    return tidy.with_columns(ratio.value.alias(name) for name, ratio in fed.items())


def measured(frame: pl.DataFrame) -> pl.DataFrame:
    """One tidy row per configuration with every metric of `FORMULAS`; times in ms, null where nothing was timed."""
    return with_ratios(runs(frame)).with_columns(
        (1 - _quotient(pl.col("bound_compulsory"), pl.col("bound_accesses"))).alias("compulsory_limit"),
        ((pl.col("bytes_demand") + pl.col("bytes_prefetch")) / 1e9).alias("gb_moved"),
        *frame.select(_latencies(frame)).get_columns(),
    )


def figures_of(frame: pl.DataFrame) -> dict[str, float | None]:
    """Every metric of `FORMULAS` for the one configuration of a frame; null where undefined."""
    return measured(frame).select(*FORMULAS).row(0, named=True)


def ranking(frame: pl.DataFrame, by: str = "hit_rate", called: Mapping[str, str] | None = None) -> pl.DataFrame:
    """The table that the command line prints: per capacity, best first; what varies, and the columns of `RANKED`.

    `called` names rows by their identity: a column `preset` then stands for the settings that it fixes.
    Raises ResultError if `by` is none of those columns.
    """
    if by not in RANKED:
        raise unknown("ranking column", by, RANKED)
    table = measured(frame).with_columns(_names(called))
    shown = [field for field in fields(frame) if _tells_apart(table, field)]
    shown.sort(key=lambda field: field != "capacity")  # what the rows are grouped by comes first
    order = ["capacity_bytes", by, "tpot_ms", *shown]
    descending = [False, RANKED[by], *[False] * (len(order) - 2)]
    names = ["preset"] if called else []
    return table.sort(order, descending=descending, nulls_last=True).select(*names, *shown, *RANKED)


def _names(called: Mapping[str, str] | None) -> list[pl.Expr]:
    return [pl.col("identity").replace_strict(called).alias("preset")] if called else []


def _tells_apart(table: pl.DataFrame, field: str) -> bool:
    """Whether the field varies. Eviction is always shown, except where rows have names."""
    if "preset" not in table.columns:
        return field == "eviction" or table[field].n_unique() > 1
    within = table.group_by("preset").agg(pl.col(field).n_unique())[field].max()
    return within != 1 or (field == "capacity" and table[field].n_unique() > 1)


def ranked(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    """Every configuration, the best by one figure first: its identity, what varies, and the columns of `RANKED`.

    Raises ResultError if `by` is none of those columns.
    """
    if by not in RANKED:
        raise unknown("ranking column", by, RANKED)
    table = measured(frame)
    varying = [field for field in fields(frame) if table[field].n_unique() > 1]
    order = table.sort(by, "identity", descending=[RANKED[by], False], nulls_last=True)
    return order.select("identity", *varying, *RANKED)


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
