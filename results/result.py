"""The result of a replay: integer counters by name, per (layer, phase) and per request; and every metric, defined once.

A metric is a sum of counters over a sum of counters. It is undefined (not zero or infinite) if a counter is
missing or the denominator is zero. `value` computes it for one configuration, layer or request; `expression` for a
column of a frame. `OTHERS` declares the metrics that are not such ratios: a median and a complement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moereplay.results.counters import DECODED, ENERGY, nanojoules
from moereplay.results.errors import unknown
from moereplay.traces.units import GB, MS, SECOND

if TYPE_CHECKING:
    import polars as pl

Row = dict[str, Any]
Columns = Mapping[str, list[Any]]  #: of many rows, by name


@dataclass(frozen=True)
class Event:
    """A line of the event log; t1 = t0 if it takes no time."""

    t0: int
    t1: int
    kind: str
    step_pass: int
    layer: int
    expert: int
    precision: int
    cause: str


@dataclass(frozen=True)
class Result:
    """A replay's outcome; the same trace, configuration and version give the same."""

    config: Row
    kinds: Mapping[str, str]  #: of each setting in `config`: a key of `results.schema.DTYPES`
    totals: Row
    per_layer: list[Row]
    per_request: list[Row]
    about: Row
    events: list[Event] = field(default_factory=list)
    request_layers: Columns = field(default_factory=dict)  #: of a row per request, layer and phase, if they were kept

    def __repr__(self) -> str:
        what = f"{self.about['model']}, {self.config['eviction']} at {self.config['capacity']}"
        return f"<Result {self.about['label']}: {what}, {self.totals['hits']:,} hits in {self.totals['accesses']:,}>"

    def to_json(self) -> Row:
        """Return the document that `replay --json` prints."""
        return {
            "config": self.config,
            "about": self.about,
            "totals": self.totals,
            "per_layer": self.per_layer,
            "per_request": self.per_request,
        }

    def frame(self) -> pl.DataFrame:
        """Return one tidy row: settings, every counter, `time_ns`; bounds are null."""
        from moereplay.results.read import runs

        return runs(self._nested())

    def layers_frame(self) -> pl.DataFrame:
        """Return one tidy row per layer and phase ("prefill", "decode"); a phase without steps has no row."""
        from moereplay.results.read import layers

        return layers(self._nested())

    def _nested(self) -> pl.DataFrame:
        from moereplay.results.schema import nested

        return nested([self.to_json()], [None], self.kinds)


#: Sums over the requests of a run, in addition to its totals; `prefills` counts requests that have a `ttft_ns`.
TIMES = ("ttft_ns", "prefills", "decode_ns", "decode_tokens")
Counters = Mapping[str, Any]  #: by name; a missing or null one makes what needs it undefined


@dataclass(frozen=True)
class Metric:
    """A ratio of sums of counters, in the unit of its column."""

    over: tuple[str, ...]
    under: tuple[str, ...] = ()  #: none divides by 1
    times: float = 1.0
    per: float = 1.0  #: together with `times` the unit of the column: ms are per=1e6
    larger_is_better: bool = True
    head: str = ""  #: in tables of a terminal; the name if empty
    words: str = ""  #: in documentation; the ratio if empty

    @property
    def formula(self) -> str:
        """The metric as text, for documentation: hits / accesses."""
        parts = [" + ".join(side) for side in (self.over, self.under) if side]
        return self.words or " / ".join(f"({part})" if "+" in part else part for part in parts)

    @property
    def factor(self) -> float:
        """The number by which the bare ratio is multiplied."""
        return self.times / self.per

    def score(self, value: float) -> float:
        """Return the value, or minus it where smaller is better: the best has the largest score."""
        return value if self.larger_is_better else -value

    def value(self, counters: Counters) -> float | None:
        """Compute the metric from counters; None if it is undefined."""
        over = _total(counters, self.over)
        under = _total(counters, self.under) if self.under else 1
        found = quotient(over, under)
        return None if found is None else found * self.times / self.per

    def expression(self) -> pl.Expr:
        """Return the metric as an expression over columns that are called like the counters."""
        import polars as pl

        over = pl.sum_horizontal(self.over, ignore_nulls=False)
        if not self.under:
            return over * self.times / self.per
        under = pl.sum_horizontal(self.under, ignore_nulls=False)
        return pl.when(under != 0).then(over / under) * self.times / self.per


METRICS: dict[str, Metric] = {
    "hit_rate": Metric(("hits",), ("accesses",), head="hit"),
    "late_rate": Metric(("late",), ("accesses",)),
    "complete_share": Metric(("complete_steps",), ("steps",), head="complete"),
    "collisions_per_miss": Metric(("collisions",), ("misses",), larger_is_better=False, head="coll"),
    "collisions_per_access": Metric(("collisions",), ("accesses",), larger_is_better=False),
    "prefetch_precision": Metric(("prefetch_used",), ("prefetch_started",)),
    "prefetch_recall": Metric(("prefetch_used",), ("prefetch_used", "misses")),
    "predictor_precision": Metric(("predicted_demanded",), ("predicted",)),
    "predictor_recall": Metric(("predicted_demanded",), ("predictable",)),
    "wasted_share": Metric(("bytes_wasted",), ("bytes_prefetch",), larger_is_better=False),
    "choice_kept": Metric(("assignments_kept",), ("assignments",)),
    "mass_share_kept": Metric(("mass_kept",), ("mass",)),
    "mass_share_substituted": Metric(("mass_substituted",), ("mass",), larger_is_better=False),
    "mass_share_dropped": Metric(("mass_dropped",), ("mass",), larger_is_better=False),
    "mass_share_low_precision": Metric(("mass_low_precision",), ("mass",), larger_is_better=False),
    "mean_displacement": Metric(("rank_displacement",), ("assignments",), larger_is_better=False),
    "mean_variation": Metric(("variation",), ("mass",), larger_is_better=False),
    "stall_share": Metric(("stall_ns",), ("time_ns",), larger_is_better=False),
    "belady_hit_rate": Metric(("bound_belady_hits",), ("bound_accesses",), head="belady"),
    "feasible_hit_rate": Metric(("bound_feasible_hits",), ("bound_accesses",)),
    "ttft_mean_ms": Metric(
        ("ttft_ns",),
        ("prefills",),
        per=MS,
        larger_is_better=False,
        head="TTFT",
        words="mean over requests of request start to the end of its prompt",
    ),
    "tpot_ms": Metric(
        ("decode_ns",),
        ("decode_tokens",),
        per=MS,
        larger_is_better=False,
        head="TPOT",
        words="sum of decode_ns / sum of decode_tokens, over requests",
    ),
    "tokens_per_s": Metric(
        ("decode_tokens",),
        ("decode_ns",),
        times=SECOND,
        head="tok/s",
        words="sum of decode_tokens / sum of decode_ns: the speed that a request sees; rejected drafts are no tokens",
    ),
    "gb_moved": Metric(
        ("bytes_demand", "bytes_prefetch"),
        per=GB,
        larger_is_better=False,
        head="GB",
        words="(bytes_demand + bytes_prefetch) / 1e9",
    ),
    "gb_lower": Metric(
        ("bytes_lower",),
        per=GB,
        larger_is_better=False,
        head="GB lower",
        words="bytes_lower / 1e9: what platforms with more than two tiers read into those below the fast one",
    ),
    "joules": Metric(
        (ENERGY,),
        per=SECOND,
        larger_is_better=False,
        words="energy of the run by the watts of the platform's `[power]`, which docs/platforms.md describes",
    ),
    "mj_per_token": Metric(
        (DECODED,),
        ("decode_tokens",),
        per=MS,
        larger_is_better=False,
        head="mJ/tok",
        words="energy of the decode phase / sum of decode_tokens, in millijoules",
    ),
    "capacity_gb": Metric(("capacity_bytes",), per=GB, larger_is_better=False, words="capacity_bytes / 1e9"),
}
#: Ratios of counters alone: every tidy frame with these columns can have them, those of layers and requests too.
RATIOS = tuple(name for name, each in METRICS.items() if each.under and not {*each.over, *each.under} & {*TIMES})
#: Metrics that are not ratios of sums, with their definitions.
OTHERS: dict[str, str] = {
    "compulsory_limit": "1 - bound_compulsory / bound_accesses: no cache without prefetch hits more",
    "ttft_median_ms": "median over requests of the time from request start to the end of its prompt",
}
#: As papers define it; delayed hits are not misses. Without prefetch it is 1 - hit rate.
MISS_RATE = Metric(("misses",), ("accesses",), larger_is_better=False)
#: The metrics of a result, in the order of documentation.
DOCUMENTED = (
    *RATIOS,
    "compulsory_limit",
    "ttft_mean_ms",
    "ttft_median_ms",
    "tpot_ms",
    "tokens_per_s",
    "gb_moved",
    "gb_lower",
    "joules",
    "mj_per_token",
)
#: The columns of a ranking: True where larger is better.
RANKED: dict[str, bool] = {
    name: METRICS[name].larger_is_better if name in METRICS else True
    for name in (
        "hit_rate",
        "belady_hit_rate",
        "compulsory_limit",
        "collisions_per_miss",
        "ttft_mean_ms",
        "tpot_ms",
        "tokens_per_s",
        "gb_moved",
    )
}
#: Metrics that a search can optimise and a driver compares as results arrive.
SEARCHED = ("hit_rate", "ttft_mean_ms", "tpot_ms", "gb_moved", "capacity_gb", "mass_share_kept", "choice_kept")
#: Earlier names, which are still read.
ALIASES = {"mass_kept": "mass_share_kept", "ttft_ms": "ttft_mean_ms"}


def named(name: str) -> str:
    """Return the present name of a metric that may be called by an earlier one."""
    return ALIASES.get(name, name)


def ranking_column(name: str) -> str:
    """Return the present name of a column to rank by. Raises ResultError for another one."""
    if named(name) not in RANKED:
        raise unknown("ranking column", name, RANKED)
    return named(name)


def formula(name: str) -> str:
    """Return the formula of a metric for the documentation."""
    return OTHERS[name] if name in OTHERS else METRICS[name].formula


def request_times(requests: Sequence[Counters]) -> dict[str, int]:
    """Return the sums `TIMES` over the rows of requests, in nanoseconds and tokens."""
    first = prefill_times(requests)
    decode_ns, tokens = (sum(row[name] or 0 for row in requests) for name in ("decode_ns", "decode_tokens"))
    return dict(zip(TIMES, (sum(first), len(first), decode_ns, tokens), strict=True))


def prefill_times(requests: Sequence[Counters]) -> list[int]:
    """Return the time to the first token, in ns, of each request that has a prefill."""
    return [row["ttft_ns"] for row in requests if row["ttft_ns"] is not None]


def values(counters: Counters, requests: Sequence[Counters] = ()) -> dict[str, float | None]:
    """Compute every metric of a configuration from its totals, and from `bound_` counters if they are known.

    Metrics of time are undefined without rows of requests.
    """
    known = {**counters, **request_times(requests)}
    found = {name: each.value(known) for name, each in METRICS.items()}
    compulsory = quotient(known.get("bound_compulsory"), known.get("bound_accesses"))
    first = prefill_times(requests)
    found["compulsory_limit"] = None if compulsory is None else 1 - compulsory
    from statistics import median  # the table of one replay has none

    found["ttft_median_ms"] = median(first) / MS if first else None
    return found


def values_of(result: Result) -> dict[str, float | None]:
    """Compute every metric of a replay except those of bounds."""
    energy = nanojoules(result.about, result.totals, result.per_layer)
    known = {**result.totals, **energy, "capacity_bytes": result.about.get("capacity_bytes")}
    return values(known, result.per_request)


def searched(result: Result) -> dict[str, float]:
    """Compute the metrics of `SEARCHED` that are defined for a replay."""
    found = values_of(result)
    return {name: value for name in SEARCHED if (value := found[name]) is not None}


def quotient(over: float | None, under: float | None) -> float | None:
    """Divide; None where either is unknown or the denominator is zero."""
    return None if over is None or not under else over / under


def _total(counters: Counters, names: tuple[str, ...]) -> int | None:
    total = 0
    for name in names:
        if (amount := counters.get(name)) is None:
            return None
        total += amount
    return total
