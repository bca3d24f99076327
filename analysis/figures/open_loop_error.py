"""The open-loop error against lambda, the strength with which routing prefers resident experts."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from moereplay.analysis.figures.facets import MOST_COLUMNS, NO_BREAK, shared
from moereplay.analysis.figures.lines import apart, from_zero
from moereplay.analysis.figures.sheet import DPI, Grid, Sheet, Wording
from moereplay.analysis.figures.validation import LABEL, LIVE, REPLAYED, tidy
from moereplay.analysis.palette import MUTED
from moereplay.results.result import ResultError
from moereplay.results.settings import NAMES

OPTIONS: dict[str, tuple[str, ...]] = {}
ERROR = {"color": MUTED, "marker": "s", "markersize": 4, "lw": 1.3, "label": "replayed - live"}
HEADINGS = ("miss rate", "error of the miss rate, percentage points", "perplexity, % above the model alone")
NOTE = (
    "Replayed: the baseline recording, whose logits do not react to the changed mixture. Perplexity: of the recorded "
    "tokens, live under the policy, above that of the model alone."
)


def draw(frame: pl.DataFrame) -> Figure:
    """Miss rates, their difference and the perplexity over lambda; a column of panels per combination of the rest.

    Raises ResultError unless two lambdas or more were run with the rest of a set unchanged.
    """
    rows = _points(tidy(frame))
    families = _families(rows)
    if not families:
        raise ResultError(
            "open_loop_error needs two lambdas or more of one policy set; "
            "validate several, for example --routing cache_prior:lam=0,cache_prior:lam=.1,cache_prior:lam=.25"
        )
    if len(families) > MOST_COLUMNS:
        raise ResultError(f"{len(families)} policy sets do not fit a page of {MOST_COLUMNS} columns; validate fewer")
    scored = rows["perplexity"].drop_nulls().len() > 0
    grid = Grid(
        _titles(families),
        HEADINGS if scored else HEADINGS[:2],
        (6.0 if len(families) == 1 else 3.0, 1.5),
        scales="rows",
    )
    wording = Wording("The open-loop error of cache-aware routing", _common(families), LABEL, "lambda", "", NOTE)
    sheet = Sheet(grid, wording, [Line2D([], [], **look) for look in (LIVE, REPLAYED, ERROR)])
    for column, family in enumerate(families):
        _fill([panels[column] for panels in sheet.panels], family)
    _scale([panels[0] for panels in sheet.panels], pl.concat(families))
    return sheet.figure


def _points(rows: pl.DataFrame) -> pl.DataFrame:
    """Sets with a lambda, with miss rates `live` and `replayed`, `error`, and `perplexity` above the model's in %."""
    sums = pl.col("layers").list
    rates = [
        (
            sums.eval(pl.element().struct.field(f"{side}_misses")).list.sum()
            / sums.eval(pl.element().struct.field(f"{side}_accesses")).list.sum()
        ).alias(side)
        for side in ("live", "replayed")
    ]
    quality = pl.col("quality").struct
    alone = quality.field("perplexity_base")
    return (
        rows.drop_nulls("lam")
        .with_columns(*rates, (100 * (quality.field("perplexity") / alone - 1)).alias("perplexity"))
        .with_columns((pl.col("replayed") - pl.col("live")).alias("error"))
    )


def _families(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Rows that differ in lambda alone, by rising lambda; single ones are left out."""
    rest = pl.col("routing").str.replace(r":lam=[^:]+", "").alias("rest")
    parts = rows.with_columns(rest).partition_by("rest", *_settings(rows))
    return [part.sort("lam") for part in parts if part["lam"].n_unique() > 1]


def _settings(rows: pl.DataFrame) -> list[str]:
    """What tells sets apart beside the strength of the routing policy."""
    return [name for name in NAMES if name in rows.columns and name != "routing"]


def _common(families: Sequence[pl.DataFrame]) -> str:
    """What all panels share, the eviction policy included: it has no legend here."""
    rows = pl.concat(families)
    evictions = rows["eviction"].unique()
    told = f"eviction {evictions[0]}{NO_BREAK}· " if len(evictions) == 1 else ""
    return told.replace(" ", NO_BREAK, 1) + shared(rows)


def _titles(families: Sequence[pl.DataFrame]) -> list[str]:
    told = [name for name in ("rest", *_settings(families[0])) if len({family[name][0] for family in families}) > 1]
    return [", ".join(str(family[name][0]) for name in told) for family in families]


def _fill(panels: Sequence[Axes], family: pl.DataFrame) -> None:
    at = family["lam"].to_numpy()
    for side, look in (("replayed", REPLAYED), ("live", LIVE)):
        panels[0].plot(at, family[side].to_numpy(), **look, clip_on=False)
    panels[1].plot(at, 100 * family["error"].to_numpy(), **ERROR, clip_on=False)
    if len(panels) > 2:
        panels[2].plot(at, family["perplexity"].fill_null(float("nan")).to_numpy(), **LIVE, clip_on=False)
    for panel in panels[1:]:
        panel.axhline(0, color=MUTED, lw=0.8)


def _scale(firsts: Sequence[Axes], rows: pl.DataFrame) -> None:
    """Ticks at the lambdas that were run; the error around zero, as large one way as the other."""
    ran, inches = rows["lam"].unique().sort().to_list(), float(firsts[0].bbox.width) / DPI
    firsts[0].set_xticks(apart(ran, float, "{:g}".format, inches))
    firsts[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    from_zero(firsts[0], float(rows.select(pl.max_horizontal("live", "replayed").max()).item()))
    widest = 100 * float(rows["error"].abs().to_numpy().max())
    firsts[1].set_ylim(-1.2 * widest or -0.1, 1.2 * widest or 0.1)
