"""Tidy frames of results, made from the nested rows (one per configuration) that `results.stored` reads.

A tidy frame has a column per configuration field, per fact of `ABOUT_FIELDS` and per counter in the files: a counter
that older results lack is null there, one that only newer ones have is passed on. A counter with the name of a setting
has the column that its declaration says: `capacity` is what the user asked for, `capacity_misses` the misses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce

import polars as pl

from moereplay.results.counters import heading_of
from moereplay.results.errors import ResultError, unknown
from moereplay.results.remarks import ESTIMATE, ESTIMATED, assumptions, one_label, synthetic_of
from moereplay.results.schema import BOUNDS, fields_of
from moereplay.results.settings import KINDS, LEADING, OF_A_FILE
from moereplay.traces.drafts import parse_drafts
from moereplay.traces.schema import TraceError

ABOUT_FIELDS = ("identity", "label", "model", "trace", "semantics", "capacity_bytes", "capacity_forms", "token_cycles")


def runs(frame: pl.DataFrame) -> pl.DataFrame:
    """Return one tidy row per configuration: totals, `time_ns`, and bounds as `bound_*` (null if not computed)."""
    totals, bounds = pl.col("totals").struct, pl.col("bounds").struct
    counters = [name for name in fields_of(frame.schema["totals"]) if name != "lifetime"]
    return frame.select(
        *_identifying(frame),
        *(totals.field(name).alias(heading_of(name)) for name in counters),
        *(bounds.field(name).alias(f"bound_{name}") for name in BOUNDS),
    )


def settings(frame: pl.DataFrame) -> pl.DataFrame:
    """Return one tidy row per configuration, without counters."""
    return frame.select(_identifying(frame))


def phases(frame: pl.DataFrame) -> set[str]:
    """Return the phases that any row of a layer has."""
    return set(frame["per_layer"].explode(empty_as_null=False).struct.field("phase").drop_nulls().unique())


def layers(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a tidy row per configuration, layer and phase ("prefill", "decode"); phases without steps have none."""
    return _exploded(frame, "per_layer")


def requests(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a tidy row per configuration and request, in run order; times in ns, `ttft_ns` null without prefill."""
    return _exploded(frame, "per_request")


def request_layers(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a tidy row per configuration, request, layer and phase, of those counters that figures by layer divide."""
    return _exploded(frame.filter(pl.col("per_request_layer").is_not_null()), "per_request_layer")


def only(frame: pl.DataFrame, /, **wanted: str | Collection[str]) -> pl.DataFrame:
    """Return the configurations whose fields have one of the wanted values: `only(frame, contract="atomic")`.

    `trace` takes the beginning of a digest; user policies are named without the digest of their file; `draft="2"` is
    2 drafts with any other parameters. Raises ResultError naming the unknown field, or the missing values and the
    existing ones.
    """
    for field, values in wanted.items():
        if field not in fields(frame):
            raise unknown("configuration field", field, fields(frame))
        allowed = [values] if isinstance(values, str) else list(values)
        matches = [frame.select(_matches(frame, field, value)).to_series() for value in allowed]
        if absent := [value for value, those in zip(allowed, matches, strict=True) if not those.any()]:
            found = ", ".join(sorted(set(frame.select(_column(frame, field).cast(pl.String)).to_series())))
            raise ResultError(f"no result has {field} = {' or '.join(absent)}; found {found}")
        frame = frame.filter(reduce(pl.Series.__or__, matches))
    return frame


def filtered(frame: pl.DataFrame, conditions: Sequence[str]) -> pl.DataFrame:
    """Return `only` with conditions as typed, `eviction=lru,fifo`. Raises ResultError."""
    for condition in conditions:
        field, equals, values = condition.partition("=")
        several = [part for part in values.split(",") if part.partition("=")[0].strip() in fields(frame)]
        if not equals or several:
            raise ResultError(
                f"invalid condition {condition!r}: expected setting=value, for example eviction=lru,fifo; for two "
                "settings --where twice: --where eviction=lru --where capacity=5%"
            )
        frame = only(frame, **{field.strip(): values.split(",")})
    return frame


def label_of(frame: pl.DataFrame) -> str:
    """Return the label of figures made from these rows: SIMULATED, or open-loop if any row is."""
    return one_label(frame.select(pl.col("about").struct.field("label")).to_series())


def routing_of(frame: pl.DataFrame) -> list[str]:
    """Return the caution about synthetic routing, if the routing of any row is synthetic."""
    return assumptions(map(synthetic_of, routings(frame).unique().iter_rows(named=True)))


def routings(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the facts of each row that `synthetic_of` reads."""
    about = frame["about"].struct.unnest()
    return about.select(name for name in ("synthetic", "model") if name in about.columns)


def seconds_of(frame: pl.DataFrame) -> str:
    """Describe the basis of the rows' times: calibrations or estimates, with their measured error."""
    about = frame.schema["about"]
    if not isinstance(about, pl.Struct) or "calibration" not in fields_of(about):
        return ESTIMATE
    known, other = _texts(frame, "calibration"), _estimate(frame)
    if not known:
        basis = other
    elif frame.filter(pl.col("about").struct.field("calibration").is_null()).height:
        basis = f"calibrated in part ({', '.join(known)}), else {other}"
    else:
        basis = f"calibrated ({', '.join(known)})"
    return "; ".join([basis, *_bands(frame)])


def _bands(frame: pl.DataFrame) -> list[str]:
    """Return the measured error of the times, with the platforms that have it if other rows have none or another."""
    bands = _texts(frame, "band")
    if not bands or "config" not in frame.columns:
        return bands
    of = frame.select(pl.col("about").struct.field("band"), pl.col("config").struct.field("platform"))
    if len(bands) == 1 and not of["band"].null_count():
        return bands
    return [f"{', '.join(sorted(set(of.filter(band=band)['platform'])))} {band}" for band in bands]


def _texts(frame: pl.DataFrame, fact: str) -> list[str]:
    """Return the different texts of a fact, without nulls."""
    if fact not in fields_of(frame.schema["about"]):
        return []
    return sorted(set(frame.select(pl.col("about").struct.field(fact)).to_series().drop_nulls()))


def _estimate(frame: pl.DataFrame) -> str:
    """Describe uncalibrated seconds, with the reason if all rows are of a calibrated platform."""
    if "uncalibrated" not in fields_of(frame.schema["about"]):
        return ESTIMATE
    of = frame.filter(pl.col("about").struct.field("calibration").is_null())
    reasons = set(of.select(pl.col("about").struct.field("uncalibrated")).to_series())
    return f"{ESTIMATED}{', '.join(sorted(reasons))}" if reasons and None not in reasons else ESTIMATE


def fields(frame: pl.DataFrame) -> list[str]:
    """List the settings and facts that distinguish configurations, the most important first."""
    return list(dict.fromkeys([*LEADING, *fields_of(frame.schema["config"]), "semantics"]))


def _exploded(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    tidy = frame.select(*_identifying(frame), column).explode(column, empty_as_null=False)
    inner = fields_of(frame.schema[column])
    renamed = pl.col(column).struct.rename_fields([heading_of(name) for name in inner])
    return tidy.with_columns(renamed).unnest(column)


def _identifying(frame: pl.DataFrame) -> list[pl.Expr]:
    named = [_column(frame, name).alias(name) for name in fields_of(frame.schema["config"])]
    return named + [pl.col("about").struct.field(name) for name in ABOUT_FIELDS]


def _column(frame: pl.DataFrame, field: str) -> pl.Expr:
    """Return a field of the configuration or of its surroundings; lists become text, so that they compare and print."""
    if field in ABOUT_FIELDS:
        return pl.col("about").struct.field(field)
    column, kinds = pl.col("config").struct.field(field), frame.schema["config"]
    if not (isinstance(kinds, pl.Struct) and isinstance(kinds.to_schema()[field], pl.List)):
        return column
    pair = pl.element().list.eval(pl.element().cast(pl.String)).list.join(":")
    return column.list.eval(pair).list.join(" ")


def _matches(frame: pl.DataFrame, field: str, value: str) -> pl.Expr:
    text = _column(frame, field).cast(pl.String)
    if field == "trace":
        return text.str.starts_with(value)
    if field in KINDS:
        return (text == value) | (text.str.replace(OF_A_FILE, "") == value)
    if field == "draft":
        many, *others = _of_drafts(value)
        found = (text + ":").str
        return reduce(
            pl.Expr.and_, (found.contains(f":{part}:", literal=True) for part in others), found.starts_with(f"{many}:")
        )
    return text == value


def _of_drafts(value: str) -> list[str]:
    """Return the parts of a draft setting that were typed, as results spell them: `2:accept=.80` is 2, accept=0.8."""
    try:
        whole = parse_drafts(value).text.split(":")
    except TraceError:
        return [value]
    typed = {part.partition("=")[0] for part in value.split(":")[1:]}
    return [whole[0], *(part for part in whole[1:] if part.partition("=")[0] in typed)]
