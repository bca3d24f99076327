"""Layout of a figure's panels: a row per setting, a column per capacity; and the words that all panels share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import polars as pl

from moereplay.analysis.checks import caption, ringed
from moereplay.analysis.comparisons import FEW, shares_passes
from moereplay.analysis.figures.chart import NO_BREAK, Point, Series, is_narrow
from moereplay.analysis.metrics import DEFAULTS, HIGH, LOW, rows_of
from moereplay.analysis.palette import Look
from moereplay.analysis.tables import DIGITS
from moereplay.results.counters import PHASES
from moereplay.results.errors import ResultError
from moereplay.results.read import fields, phases
from moereplay.results.remarks import bracketed, one_label, synthetic_of
from moereplay.results.settings import POLICIES, bare_names
from moereplay.traces.passes import prompts_by_token

#: Adds rows by request and layer to some rows of a frame that was loaded without them.
More = Callable[[pl.DataFrame], pl.DataFrame]
MOST_ROWS, MOST_COLUMNS = 8, 6  #: panels on a page
NARROW_PANELS = 3  #: capacities on a narrow page, stacked
#: Shared fields in the order in which the subtitle names them.
SHARED = ("model", "trace", "platform", "contract", "scope", "capacity", "prefetch", "miss", "routing", "passes")
#: Defaults that the subtitle leaves out.
OMITTED_AT = {
    name: "" if default == () else default for name, default in DEFAULTS.items() if name not in (*SHARED, "eviction")
}


@dataclass(frozen=True)
class Facets:
    """Tidy rows with a column `setting`, the panels that they need, and what a page says of all of them."""

    rows: pl.DataFrame
    settings: list[str]
    capacities: list[str]
    shared: str  #: settings of every row, as one line
    label: str  #: SIMULATED, open-loop, ...
    policies: list[str]
    bound: str  #: what kind of bound Belady's is, in a sentence
    covered: str  #: which phases the totals cover
    intervals: str  #: the error bars, or why there are none
    marked: list[str]  #: identities of the configurations whose figure was checked
    checked: str  #: errors of those
    left_out: str = ""  #: which capacities have no panel, in words

    def panel(self, setting: str, capacity: str | None = None) -> pl.DataFrame:
        """Return the rows of one panel."""
        rows = self.rows.filter(pl.col("setting") == setting)
        return rows if capacity is None else rows.filter(pl.col("capacity") == capacity)

    def columned(self) -> Facets:
        """Keep as many capacities as a page has columns: both ends and some between."""
        most, many = NARROW_PANELS if is_narrow() else MOST_COLUMNS, len(self.capacities)
        if many <= most:
            return self
        chosen = [self.capacities[round(at * (many - 1) / max(1, most - 1))] for at in range(most)]
        rows = self.rows.filter(pl.col("capacity").is_in(chosen))
        left = f"{most} of {many} capacities are drawn; --where capacity=... chooses others."
        return replace(self, rows=rows, capacities=chosen, left_out=left)

    @property
    def titles(self) -> list[str]:
        """Titles of a column per capacity."""
        short = [re.sub(r"^(\d+\+\d+\+)\S+(\+\d+[a-z]+)$", r"\1...\2", each) for each in self.capacities]
        return [f"capacity {each}" if len(short) > 1 else "" for each in short]  # a list may have 100 layers


def facets(frame: pl.DataFrame, tidy: pl.DataFrame, checked: str = "hit_rate") -> Facets:
    """Lay out `tidy`, rows made from `frame`, with the checks of a figure. Raises ResultError if the panels do not fit
    a page.
    """
    bare = {kind: bare_names(tidy[kind].unique().to_list()) for kind in POLICIES if kind in tidy.columns}
    short = tidy.with_columns(
        pl.col("trace").str.head(DIGITS), *(pl.col(kind).replace(names) for kind, names in bare.items())
    )
    varying = [name for name in fields(frame) if name not in ("eviction", "capacity") and short[name].n_unique() > 1]
    words = [
        pl.concat_str(pl.lit(f"{_word(name)} "), pl.col(name).cast(pl.String).replace("", "none")) for name in varying
    ]
    rows = short.with_columns((pl.concat_str(words, separator=", ") if words else pl.lit("")).alias("setting"))
    settings = _in_order(rows, "setting", *varying)
    if len(settings) > MOST_ROWS:
        counts = {name: rows[name].n_unique() for name in varying}
        widest = max(counts, key=lambda name: counts[name])
        raise ResultError(
            f"{len(settings)} combinations of {', '.join(varying)} do not fit a page of {MOST_ROWS} rows; "
            f"choose fewer, for example --where {widest}={rows[widest][0]}"
        )
    brackets = bracketed(frame.select("bounds").iter_rows(named=True))
    return Facets(
        rows=rows,
        settings=settings,
        capacities=_in_order(rows, "capacity", "capacity_bytes"),
        shared=shared(rows),
        label=one_label(rows["label"]),
        policies=rows["eviction"].unique().sort().to_list(),
        bound=f"{brackets[0][0].upper()}{brackets[0][1:]}." if brackets else "",
        covered=covered(frame),
        intervals=_intervals(frame),
        marked=ringed(frame, checked),
        checked=caption(frame, checked),
    )


def _in_order(rows: pl.DataFrame, name: str, *keys: str) -> list[str]:
    """Return the values of a column, ordered by the columns `keys`; numbers inside texts by their size."""
    unique = rows.select(*(other for other in keys if other != name), name).unique().rows()

    def key(value: object) -> list[tuple[float, str]]:  # poisson:5 comes before poisson:20
        parts = re.split(r"(\d+(?:\.\d+)?)", str(value))
        return [(float(part), "") if at % 2 else (-1, part) for at, part in enumerate(parts)]

    return list(dict.fromkeys(row[-1] for row in sorted(unique, key=lambda row: list(map(key, row)))))


def shared(rows: pl.DataFrame) -> str:
    """Return the settings that every tidy row has in common, as one line."""
    alone = [name for name in (*SHARED, *OMITTED_AT) if name in rows.columns and rows[name].n_unique() == 1]
    told = [name for name in alone if name not in OMITTED_AT or rows[name][0] != OMITTED_AT[name]]
    words = [str(rows[name][0]) if name == "model" else f"{_word(name)} {rows[name][0]}" for name in told]
    return f"{NO_BREAK}· ".join(word.replace(" ", NO_BREAK) for word in words)


def _word(name: str) -> str:
    return name.replace("_", " ")


# What panels draw


def lines(rows: pl.DataFrame, x: str, y: str, looks: Mapping[str, Look], by: str = "eviction") -> list[Series]:
    """Return a series per look, of the rows whose column `by` is its name; a null is a gap.

    Intervals are the columns `Y_low` and `Y_high`, if there are any.
    """
    ends = (f"{y}{LOW}", f"{y}{HIGH}")
    chosen = [pl.col(name) if name in rows.columns else pl.lit(None).alias(name) for name in (*ends, "identity")]
    columns = rows.sort(x).select(by, x, y, *chosen)
    series = [
        Series(name, look, [Point(*row[1:]) for row in columns.filter(pl.col(by) == name).iter_rows()])
        for name, look in looks.items()
    ]
    return [line for line in series if line.points]


def panel_size(rows: int, columns: int) -> tuple[float, float]:
    """Return the width and height in inches for a number of panels."""
    return 6.0 if columns == 1 else 3.0, 3.4 if rows == columns == 1 else 2.1


# Words below a figure

BARS = "Bars:"  #: begins the sentence on intervals that are there

BY_TOKEN = "prompt tokens (one per pass)"
ONLY = {"prefill": "every pass is a prompt's", "decode": "no prompt was replayed"}


def phase_names(frame: pl.DataFrame) -> dict[str, str]:
    """Return what the passes of each phase are called: prompts that run token by token have no prefill."""
    by_token = set(map(prompts_by_token, frame["config"].struct.field("passes")))
    words = "prompts" if len(by_token) > 1 else BY_TOKEN if by_token == {True} else "prefill"
    return dict(zip(PHASES, (words, "decode"), strict=True))


def covered(frame: pl.DataFrame, *wanted: str) -> str:
    """Return which phases the totals of a frame cover, or the `wanted` ones of them, as a sentence.

    Empty if no row of a layer was stored.
    """
    names, found = phase_names(frame), phases(frame)
    known = [phase for phase in PHASES if phase in found]
    shown = [phase for phase in known if phase in (wanted or known)]
    words = " and ".join(names[phase] for phase in shown).capitalize()
    if len(shown) > 1:
        return f"{words} together."
    why = f": {ONLY[known[0]]}" if len(known) == 1 else ""
    return f"{words} only{why}." if shown else ""


def _intervals(frame: pl.DataFrame) -> str:
    """Explain the error bars, or why there are none."""
    every = [rows_of(frame, at) for at in range(len(frame))]
    if all(synthetic_of(about) for about in frame["about"]):
        return "No intervals: the routing is synthetic."
    if not any(every):
        return "No intervals: per-request rows were not stored."
    kept = [rows for rows in every if rows]
    if all(shares_passes(rows) for rows in kept):
        return "No intervals: requests share passes."
    if max(map(len, kept)) < FEW:
        return "No intervals: one request." if max(map(len, kept)) == 1 else f"No intervals: fewer than {FEW} requests."
    kept = [rows for rows in kept if len(rows) >= FEW]
    return f"{BARS} 95% CI over requests (n = {min(map(len, kept))})."


def joined(*sentences: str) -> str:
    """Return the sentences of a note, without those that are empty."""
    return " ".join(filter(None, sentences))
