"""One configuration of a frame of results compared with every other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from moereplay.analysis.comparisons import CANT_TELL, PARTS, TEST_LEVEL, Comparison, against, enough
from moereplay.analysis.metrics import entries, measured
from moereplay.analysis.verdict import (
    FORESEES,
    GENERATED,
    NO_INTERVAL,
    SHARED,
    Entry,
    Foresight,
    name_of_set,
    same_routing,
)
from moereplay.results.errors import ResultError, unknown
from moereplay.results.read import fields
from moereplay.results.remarks import Ranked, turned
from moereplay.results.result import RANKED
from moereplay.results.settings import KINDS, OF_A_FILE
from moereplay.traces.texts import between, counted, percent

#: Figures that depend on the platform although the routing does not.
TIMED = ("tpot_ms", "tokens_per_s", "ttft_mean_ms")
SPEEDS = ("tpot_ms", "tokens_per_s")  #: figures of decoding, which decisions slow down
TWO = 2  #: requests that a comparison needs
MOST_COUNTED = 8  #: rows of another platform that get a remark


class Compared(NamedTuple):
    """One row per other configuration, and remarks on all of them."""

    one: str  #: name of the configuration that the others are compared with
    rows: list[dict[str, Any]]
    remarks: list[str]


def beside(
    frame: pl.DataFrame,
    wanted: str,
    by: str,
    foresees: Foresight = lambda row: False,
    deciding: Callable[[Mapping[str, Any]], int] = lambda row: 0,
) -> Compared:
    """Compare one configuration with every other over the same trace, best first.

    A row has the settings that vary, the figure, and the comparison. `difference` is the wanted configuration's figure
    minus the row's, `low`, `high` and `half_width` its 95 % CI, `p_holm` its p-value corrected for the number of tests,
    `better` yes, no or can't tell. Configurations that know the future are not tested. Where a row
    can differ in time alone, as on another platform, `better_on` counts the requests on which the wanted one is better.

    `wanted` is the beginning of an identity, a policy, or setting=value; `deciding` counts the policies of a row that
    predict or score. Raises ResultError if `wanted` does not match exactly one configuration, if the figure cannot be
    compared, or if per-request rows were not stored.
    """
    if by not in PARTS:
        raise unknown("figure to compare", by, PARTS)
    table = measured(frame).with_row_index("at")
    one = _wanted(table, wanted)
    table = table.filter(pl.col("trace") == one["trace"], pl.col("at") != one["at"], pl.col(by).is_not_null())
    table = table.sort(by, "identity", descending=[RANKED[by], False])
    known = {entry.settings["identity"]: entry for entry in entries(frame, foresees)}
    ours, others = known[one["identity"]], [known[name] for name in table["identity"]]
    found = _found(ours, others, by)
    if not any(each.requests for each in found):
        raise ResultError("no comparison: per-request rows were not stored; run the sweep again with `requests = true`")
    varying = [name for name in fields(frame) if measured(frame)[name].n_unique() > 1]
    rows = table.select("identity", *varying, by).iter_rows(named=True)
    is_bound = [ours.foresees or each.foresees for each in others]
    said = [row | _columns(each, bound, by) for row, each, bound in zip(rows, found, is_bound, strict=True)]
    exact = [by in TIMED and same_routing(ours, each) for each in others]
    counts = [
        f"{name_of_set(other, varying)}: {_on(each, by)}"
        for other, each, is_exact, bound in zip(others, found, exact, is_bound, strict=True)
        if is_exact and not bound and each.difference
    ]
    remarks = [*counts[:MOST_COUNTED], *_remarks(found, is_bound, ours)]
    if by in SPEEDS:
        ranked = [entry for entry in (ours, *others) if not entry.foresees and entry.tokens_per_s]
        stored = frame["per_layer"].head(1).to_list()
        layers = max((row["layer"] + 1 for rows in stored for row in rows or ()), default=0)  # 0: not stored
        remarks += _turned(ranked, varying, deciding, layers)
    return Compared(wanted if wanted != one["identity"] else wanted[:8], said, remarks)


def _turned(
    ranked: Sequence[Entry], varying: Sequence[str], deciding: Callable[[Mapping[str, Any]], int], layers: int
) -> list[str]:
    """Return a remark if an assumed price of decisions would change the order of the two fastest."""
    speeds = [
        Ranked(name_of_set(entry, varying), entry.tokens_per_s or 0.0, deciding(entry.settings))
        for entry in sorted(ranked, key=lambda entry: -(entry.tokens_per_s or 0.0))[:2]
    ]
    if len(speeds) < TWO:
        return []
    remark = turned(speeds[0], speeds[1], layers)
    return [remark] if remark else []


def _found(ours: Entry, others: Sequence[Entry], by: str) -> list[Comparison]:
    """Compare with each other configuration; those that know the future take no part in the correction."""
    tested = [other for other in others if not (other.foresees or ours.foresees)]
    exact = [by in TIMED and same_routing(ours, each) for each in tested]
    rows = ours.rows()
    made = iter(against(rows, [each.rows() for each in tested], by, exact=exact))
    bounds = iter(against(rows, [other.rows() for other in others if other.foresees or ours.foresees], by))
    found = [next(bounds if other.foresees or ours.foresees else made) for other in others]
    if not ours.synthetic:
        return found
    return [each._replace(off=None, p=None, answer=each.answer if each.p is None else CANT_TELL) for each in found]


def _columns(made: Comparison, is_bound: bool, by: str) -> dict[str, Any]:
    low, high = (
        None if made.off is None or made.difference is None else made.difference + sign * made.off for sign in (-1, 1)
    )
    counts = made.counted
    return {
        "difference": made.difference,
        "low": low,
        "high": high,
        "half_width": made.off,
        "p_holm": None if is_bound else made.p,
        "better": FORESEES if is_bound else made.answer,
        "requests": made.requests,
        "better_on": None if counts is None or made.shared else counts.above if RANKED[by] else counts.below,
    }


def _on(made: Comparison, by: str) -> str:
    """Write: better on 6 of 6 requests, difference 12% to 31%."""
    found = made.counted
    if found is None:
        return "no shared request has the figure"
    better = found.above if RANKED[by] else found.below
    apart = ""
    if found.least_share is not None and found.most_share is not None:
        apart = f", difference {between(percent(found.least_share, True), percent(found.most_share, True))}"
    return f"differs only in time, not tested: better on {better} of {counted(found.requests, 'request')}{apart}"


def _remarks(found: Sequence[Comparison], is_bound: Sequence[bool], ours: Entry) -> list[str]:
    """Explain missing intervals, and how many requests would decide."""
    said = []
    if ours.foresees:
        said.append(f"not tested: the configuration {FORESEES}")
    if ours.synthetic:
        said.append(NO_INTERVAL[GENERATED])
    if any(each.shared for each in found):
        said.append(f"{NO_INTERVAL[SHARED]}, and each pass is charged to one of them")
    tested = [each for each, bound in zip(found, is_bound, strict=True) if each.p is not None and not bound]
    requests, needed = min((each.requests for each in tested), default=0), enough(max(1, len(tested)))
    open_ones = [each for each in tested if (each.p or 0) >= TEST_LEVEL]
    if open_ones and TWO <= requests < needed:
        fewer = "" if len(tested) == 1 else "; or compare fewer, with --where"
        left = f"{len(open_ones)} of {counted(len(tested), 'comparison')}"
        said.append(f"{counted(requests, 'request')} leave {left} undecided: record {needed} or more{fewer}")
    return said


def _wanted(table: pl.DataFrame, wanted: str) -> dict[str, Any]:
    name, equals, value = wanted.partition("=")
    is_setting = bool(equals) and ":" not in name  # `least_stale:order=a` is a policy
    if is_setting and name not in table.columns:
        raise ResultError(f"unknown setting {name!r} in condition {wanted!r}")
    columns, sought = ([name], value) if is_setting else ([*KINDS], wanted)
    meant = pl.any_horizontal(_is(column, sought) for column in columns)
    found = table.filter(meant if is_setting else meant | pl.col("identity").str.starts_with(wanted))
    if len(found) != 1:
        raise ResultError(_not_one(wanted, found, columns))
    return found.row(0, named=True)


def _is(column: str, sought: str) -> pl.Expr:
    """Match a setting's value; a user's policy also matches without the version of its file, as in --where."""
    text = pl.col(column).cast(pl.String)
    return (text == sought) | (text.str.replace(OF_A_FILE, "") == sought) if column in KINDS else text == sought


def _not_one(wanted: str, found: pl.DataFrame, columns: Sequence[str]) -> str:
    if found.is_empty():
        return (
            f"no configuration matches {wanted!r}: expected an id of `moereplay sweep show`, a policy, or setting=value"
        )
    versions = {text for column in columns for text in found[column].cast(pl.String) if re.search(OF_A_FILE, text)}
    if len(versions) > 1 and not re.search(OF_A_FILE, wanted):
        return f"{wanted!r} matches {len(versions)} versions of a policy file; pass one: {', '.join(sorted(versions))}"
    ids = ", ".join(each[:8] for each in found["identity"][:3])
    return f"{wanted!r} matches {counted(len(found), 'configuration')} ({ids}, ...); pass one id, or add {_hint(found)}"


def _hint(found: pl.DataFrame) -> str:
    """Return a condition that separates these rows."""
    for name in ("capacity", "platform", "prefetch", "miss", "scope", "passes"):
        if name in found.columns and found[name].n_unique() == len(found):
            return f"--where {name}={found[name][0]}"
    return "--where"
