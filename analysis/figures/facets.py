"""Layout of panels: a row per setting, a column per capacity, and a subtitle of what all panels share."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from moereplay.results.errors import ResultError
from moereplay.results.read import fields
from moereplay.results.settings import SETTINGS

MOST_ROWS, MOST_COLUMNS = 8, 6  #: panels that a page can hold
#: Shared fields in the order in which the subtitle names them.
SHARED = ("model", "trace", "platform", "contract", "scope", "capacity", "prefetch", "miss", "routing", "passes")
#: Defaults that the subtitle leaves out.
UNSAID = {
    each.name: "" if each.default == () else each.default for each in SETTINGS if each.name not in (*SHARED, "eviction")
}
NO_BREAK = "\N{NO-BREAK SPACE}"  # a field stays on one line
DIGEST = 8  #: digits of a trace digest that a reader can compare


@dataclass(frozen=True)
class Facets:
    """Tidy rows with a column `setting`, and the panels that they need."""

    rows: pl.DataFrame
    settings: list[str]
    capacities: list[str]
    shared: str  #: one line: what every row has in common
    label: str  #: SIMULATED, open-loop, ...
    policies: list[str]

    def panel(self, setting: str, capacity: str | None = None) -> pl.DataFrame:
        """The rows of one panel."""
        rows = self.rows.filter(pl.col("setting") == setting)
        return rows if capacity is None else rows.filter(pl.col("capacity") == capacity)


def facets(frame: pl.DataFrame, tidy: pl.DataFrame) -> Facets:
    """Panels of `tidy`, rows made from `frame`. Raises ResultError if they are more than a page can hold."""
    short = tidy.with_columns(pl.col("trace").str.head(DIGEST))
    varying = [name for name in fields(frame) if name not in ("eviction", "capacity") and short[name].n_unique() > 1]
    spelled = [pl.concat_str(pl.lit(f"{_word(name)} "), _text(name)) for name in varying]
    setting = pl.concat_str(spelled, separator=", ") if spelled else pl.lit("")
    rows = short.with_columns(setting.alias("setting"))
    found = Facets(
        rows=rows,
        settings=_in_order(rows, "setting", *varying),
        capacities=_in_order(rows, "capacity", "capacity_bytes"),
        shared=shared(rows),
        label=_label(rows),
        policies=rows["eviction"].unique().sort().to_list(),
    )
    _check(found, varying)
    return found


def column_titles(found: Facets) -> list[str]:
    """Of a column per capacity; one alone is in the subtitle. Raises ResultError if they do not fit a page."""
    if len(found.capacities) > MOST_COLUMNS:
        raise ResultError(
            f"{len(found.capacities)} capacities do not fit a page of {MOST_COLUMNS} columns; "
            f"choose fewer, for example --where capacity={found.capacities[0]}, or draw hit_rate_by_capacity"
        )
    return [f"capacity {capacity}" for capacity in found.capacities] if len(found.capacities) > 1 else [""]


def _check(found: Facets, varying: list[str]) -> None:
    if len(found.settings) > MOST_ROWS:
        counts = {name: found.rows[name].n_unique() for name in varying}
        widest = max(counts, key=lambda name: counts[name])
        raise ResultError(
            f"{len(found.settings)} combinations of {', '.join(varying)} do not fit a page of {MOST_ROWS} rows; "
            f"choose fewer, for example --where {widest}={found.rows[widest][0]}"
        )


def _in_order(rows: pl.DataFrame, name: str, *keys: str) -> list[str]:
    """Distinct values of a column, smallest keys first."""
    order = [key for key in keys if key != name]
    return rows.sort(*order, name)[name].unique(maintain_order=True).to_list() if order else sorted(set(rows[name]))


def shared(rows: pl.DataFrame) -> str:
    """One line: the settings that every tidy row has in common."""
    alone = [name for name in (*SHARED, *UNSAID) if name in rows.columns and rows[name].n_unique() == 1]
    told = [name for name in alone if name not in UNSAID or rows[name][0] != UNSAID[name]]
    words = [str(rows[name][0]) if name == "model" else f"{_word(name)} {rows[name][0]}" for name in told]
    return f"{NO_BREAK}· ".join(word.replace(" ", NO_BREAK) for word in words)


def _label(rows: pl.DataFrame) -> str:
    labels = sorted(set(rows["label"]))
    return labels[0] if len(labels) == 1 else " / ".join(labels)


def _text(name: str) -> pl.Expr:
    return pl.col(name).cast(pl.String).replace("", "none")


def _word(name: str) -> str:
    return name.replace("_", " ")
