"""Errors of a sweep's replays where they were checked against real runs: in words, as columns, and for figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import fmean
from typing import Any, NamedTuple

import polars as pl

from moereplay.results.checks import Check, How
from moereplay.results.settings import NAMES
from moereplay.traces.units import MB

#: Column of a results frame: the check of a configuration, null without one.
COLUMN = "check"
MOST_VALUES = 12  #: values of an axis that are listed
KINDS_OF_LOOP = ("closed-loop", "open-loop")
_FIGURES = ("hit_rate", "ttft_ms", "tpot_ms")
_SIDES = ("checked", "replayed")
FIELDS: dict[str, Any] = {
    "way": pl.String,
    "device": pl.String,
    **{f"{side}_{name}": pl.Float64 for side in _SIDES for name in _FIGURES},
    "error": pl.Float64,
    "hit_rate_error": pl.Float64,
}
#: Fields that `sweep show` prints, with their column names.
SHOWN = {
    "way": "check",
    "checked_tpot_ms": "check_tpot_ms",
    "replayed_tpot_ms": "check_replay_tpot_ms",
    "error": "check_error",
    "hit_rate_error": "check_hit_rate_error",
}


def with_checks(frame: pl.DataFrame, checks: Sequence[Check]) -> pl.DataFrame:
    """Add a column `check` to a frame of results; unchanged if none of its configurations was checked."""
    identity = frame.select(pl.col("about").struct.field("identity")).to_series()
    by_identity = _by_identity(checks)
    found = [by_identity.get(each) for each in identity]
    if not any(found):
        return frame
    return frame.with_columns(pl.Series(COLUMN, [each and _row(each) for each in found], dtype=pl.Struct(FIELDS)))


def check_columns(table: pl.DataFrame, checks: Sequence[Check]) -> pl.DataFrame:
    """Add checks to a table with a column `identity`; unchanged if none applies."""
    rows = [{"identity": name, **_row(each)} for name, each in _by_identity(checks).items()]
    known = pl.DataFrame(rows, schema={"identity": pl.String, **FIELDS})
    known = known.select("identity", **{shown: pl.col(name) for name, shown in SHOWN.items()})
    if known.join(table, on="identity", how="semi").is_empty():
        return table
    return table.join(known, on="identity", how="left", maintain_order="left")


def in_short(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shorten rows of such a table for a terminal: the measured time and the error, if any was checked."""
    kept = [{name: value for name, value in row.items() if name not in SHOWN.values()} for row in rows]
    if not any(row.get("check") for row in rows):
        return kept
    for short, row in zip(kept, rows, strict=True):
        off = row["check_error"]
        short |= {"checked ms": row["check_tpot_ms"], "error": None if off is None else f"{off:+.1%}"}
    return kept


class Candidate(NamedTuple):
    """A configuration of a sweep that can be checked."""

    identity: str
    settings: Mapping[str, str]
    open_loop: bool


def candidates_of(frame: pl.DataFrame) -> list[Candidate]:
    """Return every configuration of a frame of results."""
    abouts, configs = (frame[name].to_list() for name in ("about", "config"))
    return [
        Candidate(
            about["identity"],
            {name: str(value) for name, value in config.items() if name in NAMES} | {"trace": about["trace"][:12]},
            "open-loop" in about["label"],
        )
        for about, config in zip(abouts, configs, strict=True)
    ]


def summary(checks: Sequence[Check], candidates: Sequence[Candidate]) -> list[str]:
    """Return a line per way of checking with its errors, and lines on which settings were covered."""
    known = {candidate.identity: candidate for candidate in candidates}
    ours = [check for check in checks if check.identity in known]
    ways = {check.how.model_dump_json(): check.how for check in ours}.values()
    lines = [_line(how, [check for check in ours if check.how == how], candidates) for how in ways]
    return [*lines, *(_coverage({check.identity for check in ours}, candidates) if ours else [])]


def _coverage(checked: AbstractSet[str], candidates: Sequence[Candidate]) -> list[str]:
    """Count checked configurations per value of each axis, and name values without any."""
    names = candidates[0].settings
    axes = {name: Counter(candidate.settings.get(name, "") for candidate in candidates) for name in names}
    seen = {
        name: Counter(candidate.settings.get(name, "") for candidate in candidates if candidate.identity in checked)
        for name, values in axes.items()
        if len(values) > 1
    }
    said = [
        f"{name} " + ", ".join(f"{value} {seen[name][value]} of {total}" for value, total in sorted(axes[name].items()))
        for name in seen
        if len(axes[name]) <= MOST_VALUES
    ]
    never = [f"{name}={value}" for name in seen for value in sorted(axes[name]) if not seen[name][value]]
    named = ", ".join(never[:MOST_VALUES]) + (
        f" and {len(never) - MOST_VALUES} more" if len(never) > MOST_VALUES else ""
    )
    lines = [f"checked of each value: {'; '.join(said)}"] if said else []
    return [*lines, *([f"not checked: no configuration with {named}"] if never else [])]


def caption(frame: pl.DataFrame, figure: str) -> str:
    """Return the caption of a figure of `tpot_ms`, `ttft_ms` or `hit_rate`: how many points were checked, and the
    error.
    """
    if not (off := error_of(frame, figure)):
        return ""
    ways = set(frame[COLUMN].struct.field("way").drop_nulls())
    how = " or ".join(word for way, word in (("measured", "measured"), ("live", "run live")) if way in ways)
    count = len(ringed(frame, figure))
    said = f"Ringed: {count} of {len(frame)} configurations, which were {how} on a part of the trace, where {off}."
    return f"{said} No open-loop configuration was checked." if _no_open_loop(frame, figure) else said


def _no_open_loop(frame: pl.DataFrame, figure: str) -> bool:
    known = set(ringed(frame, figure))
    labels = {about["identity"]: about.get("label") or "" for about in frame["about"].to_list()}
    open_loop = {identity for identity, label in labels.items() if "open-loop" in label}
    return bool(open_loop) and not open_loop & known


def error_of(frame: pl.DataFrame, figure: str) -> str:
    """Return the error of checked replays in words: mean and worst for a time, worst for a hit rate."""
    if COLUMN not in frame.columns:
        return ""
    known = frame[COLUMN].struct.unnest()
    ran, simulated = (known[f"{side}_{figure}"] for side in ("checked", "replayed"))
    off = (simulated - ran if figure == "hit_rate" else simulated / ran - 1).drop_nulls().to_list()
    if not off:
        return ""
    worst = max(off, key=abs)
    if figure == "hit_rate":
        return f"the replayed hit rate is off by {_points(abs(worst))} at most"
    name = figure.partition("_")[0].upper()
    return f"the replayed {name} is off by {fmean(map(abs, off)):.1%} (mean |error|; worst {worst:+.1%})"


def ringed(frame: pl.DataFrame, figure: str) -> list[str]:
    """Return the identities of configurations whose figure was checked."""
    if COLUMN not in frame.columns:
        return []
    known = pl.col(COLUMN).struct.field(f"checked_{figure}").is_not_null()
    return frame.filter(known).select(pl.col("about").struct.field("identity")).to_series().to_list()


def _by_identity(checks: Sequence[Check]) -> dict[str, Check]:
    """Pick the strongest check per configuration: measured over live, then most tokens."""
    least_first = sorted(checks, key=lambda check: (check.how.way == "measured", check.how.tokens))
    return {check.identity: check for check in least_first}


def _row(check: Check) -> dict[str, Any]:
    sides = {f"{side}_{name}": getattr(getattr(check, side), name) for side in _SIDES for name in _FIGURES}
    return {
        "way": check.how.way,
        "device": check.how.device,
        **sides,
        "error": check.error,
        "hit_rate_error": check.hit_rate_error,
    }


def _line(how: How, checks: Sequence[Check], candidates: Sequence[Candidate]) -> str:
    """Return the errors of one way, separately for closed-loop and open-loop sets if there are both."""
    by_kind: dict[bool, set[str]] = {False: set(), True: set()}
    for candidate in candidates:
        by_kind[candidate.open_loop].add(candidate.identity)
    said = []
    for of, word in zip(by_kind.values(), KINDS_OF_LOOP, strict=True):
        own = [check for check in checks if check.identity in of]
        if not all(by_kind.values()):
            said += _errors(own) if own else []
        elif own:
            said.append(f"{word}, {len(own)} of {len(of):,}: {'; '.join(_errors(own))}")
        else:
            said.append(f"{word}, none of {len(of):,}: error unknown")
    if how.way == "measured":
        said.append(f"load {fmean(check.load for check in checks):.1f} on average")
    return f"checked: {len(checks)} of {len(candidates):,} configurations {in_words(how)}: {'; '.join(said)}"


def _errors(checks: Sequence[Check]) -> list[str]:
    errors = [(check.error, check) for check in checks if check.error is not None]
    hits = [abs(check.hit_rate_error) for check in checks if check.hit_rate_error is not None]
    said = []
    if errors:
        off = [error for error, _ in errors]
        worst, of = max(errors, key=lambda pair: abs(pair[0]))
        what = "TPOT" if any(check.checked.tpot_ms for check in checks) else "TTFT"
        said.append(
            f"replayed {what} {fmean(off):+.1%} (mean), mean |error| {fmean(map(abs, off)):.1%}, worst {worst:+.1%} "
            f"({_called(of, checks)})"
        )
    if hits:
        said.append(f"hit rate off by {_points(max(hits))} at most")
    return said


def in_words(how: How) -> str:
    """Describe what was run, on which machine, and on how much of a trace."""
    part = f"{how.tokens} tokens of {how.layers} layers each"
    if how.way == "live":
        return f"run live, {how.model} on {how.device}, time emulated ({part})"
    rate = f", throttled to {how.throttle_bytes_per_s / MB:g} MB/s" if how.throttle_bytes_per_s else ""
    return f"measured on {how.device} ({how.slow_tier}{rate}; {part})"


def _called(check: Check, among: Sequence[Check]) -> str:
    """Name a check by the settings that vary; by policy and capacity if there is only one."""
    varying = [name for name in NAMES if len({str(each.config.get(name)) for each in among}) > 1]
    return ", ".join(f"{name} {check.config.get(name)}" for name in varying or ("eviction", "capacity"))


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
