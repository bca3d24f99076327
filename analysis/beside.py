"""Every configuration of a frame of results beside one of them: the difference, how sure it is, and which is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from analysis.comparisons import NOTHING, PARTS, Comparison, against
from analysis.metrics import measured, samples
from analysis.ratios import RANKED
from analysis.tables import counted
from results.errors import ResultError, unknown
from results.labels import synthetic_of
from results.read import fields
from results.settings import KINDS


def beside(frame: pl.DataFrame, wanted: str, by: str) -> list[dict[str, Any]]:
    """A row per other configuration over the same trace, the best first: what varies, the figure, its difference from
    the one that is wanted, ±, and whether it is better: yes, no or can't tell, corrected for the number of rows.

    Of synthetic routing only the difference is given.
    `wanted` is the beginning of an identity, a policy, or setting=value. Raises ResultError if it is not one
    configuration, if the figure cannot be compared, or if the rows of requests were not kept.
    """
    if by not in PARTS:
        raise unknown("figure to compare", by, PARTS)
    table = measured(frame).with_row_index("at")
    one = _wanted(table, wanted)
    table = table.filter(pl.col("trace") == one["trace"], pl.col("at") != one["at"], pl.col(by).is_not_null())
    table = table.sort(by, "identity", descending=[RANKED[by], False])
    if synthetic_of(frame["about"][one["at"]]):
        found = [NOTHING._replace(difference=one[by] - figure) for figure in table[by]]
    else:
        found = against(samples(frame, one["at"]), [samples(frame, at) for at in table["at"]], by)
    if all(each.difference is None for each in found):
        raise ResultError("no rows of requests to compare; an experiment keeps them with `requests = true`")
    varying = [name for name in fields(frame) if measured(frame)[name].n_unique() > 1]
    rows = table.select("identity", *varying, by).iter_rows(named=True)
    return [row | _differing(each) for row, each in zip(rows, found, strict=True)]


def _differing(made: Comparison) -> dict[str, Any]:
    """Of the row less the one wanted; `better` is the row's answer, so the comparison's the other way round."""
    turned = {"yes": "no", "no": "yes"}.get(made.answer, made.answer)
    less = None if made.difference is None else 0.0 - made.difference
    return {"difference": less, "±": made.off, "better": turned}


def _wanted(table: pl.DataFrame, wanted: str) -> dict[str, Any]:
    """The one row that is meant."""
    name, equals, value = wanted.partition("=")
    is_setting = bool(equals) and ":" not in name  # `least_stale:order=a` is a policy
    if is_setting and name not in table.columns:
        raise ResultError(f"condition {wanted!r}: no setting is called {name}")
    columns, sought = ([name], value) if is_setting else ([*KINDS], wanted)
    meant = pl.any_horizontal(pl.col(column).cast(pl.String) == sought for column in columns)
    found = table.filter(meant if is_setting else meant | pl.col("identity").str.starts_with(wanted))
    if len(found) != 1:
        raise ResultError(_not_one(wanted, found["identity"].to_list()))
    return found.row(0, named=True)


def _not_one(wanted: str, found: Sequence[str]) -> str:
    if not found:
        return f"no configuration is {wanted}; give an id of `moereplay sweep show`, a policy, or setting=value"
    ids = ", ".join(each[:8] for each in found[:3])
    return f"{counted(len(found), 'configuration')} are {wanted} ({ids}, ...); give the id of one, or add --where"
