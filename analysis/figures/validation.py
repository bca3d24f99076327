"""Live against replayed by layer: where in the model a replay misses more or less than the model itself."""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moereplay.analysis.figures.facets import DIGEST, MOST_ROWS, shared
from moereplay.analysis.figures.lines import from_zero
from moereplay.analysis.figures.sheet import Grid, Sheet, Wording
from moereplay.results.counters import COUNTERS
from moereplay.results.result import ResultError

OPTIONS: dict[str, tuple[str, ...]] = {}
#: A dot inside a ring means agreement.
LIVE = {"color": "#0072B2", "marker": "o", "markersize": 3.6, "lw": 1.3, "label": "live"}
REPLAYED = {
    "color": "#D55E00",
    "marker": "o",
    "markersize": 7.5,
    "markerfacecolor": "none",
    "lw": 1.1,
    "linestyle": (0, (3, 2)),
    "label": "replayed",
}
LABEL = "LIVE beside SIMULATED"


def draw(frame: pl.DataFrame) -> Figure:
    """Miss rate over layers, live and replayed; a panel per policy set.

    Raises ResultError if there are more sets than a page holds.
    """
    rows = tidy(frame)
    if len(rows) > MOST_ROWS:
        raise ResultError(f"{len(rows)} policy sets do not fit a page of {MOST_ROWS} panels; validate fewer")
    points = _points(rows)
    wording = Wording("Live and replayed, layer by layer", shared(rows), LABEL, "MoE layer", "miss rate", _note())
    headings = [_heading(row) for row in rows.iter_rows(named=True)]
    grid = Grid(headings if len(rows) == 1 else [""], headings, (6.0, 1.5))
    sheet = Sheet(grid, wording, [Line2D([], [], **LIVE), Line2D([], [], **REPLAYED)])
    for panel, name in zip(sheet.panels, rows["name"], strict=True):
        _lines(panel[0], points.filter(pl.col("name") == name))
    _scale(sheet.panels[0][0], points)
    return sheet.figure


def tidy(frame: pl.DataFrame) -> pl.DataFrame:
    """A row per policy set with the fields of its configuration beside it, as `facets.shared` wants them."""
    about = pl.col("about").struct
    named = [about.field(name) for name in ("model", "label", "identity")]
    trace = about.field("trace").str.head(DIGEST)
    return frame.select(pl.all().exclude("config", "about"), pl.col("config").struct.unnest(), *named, trace)


def _points(rows: pl.DataFrame) -> pl.DataFrame:
    cells = rows.select("name", "layers").explode("layers").unnest("layers")
    return cells.with_columns(
        pl.when(pl.col(f"{side}_accesses") > 0).then(pl.col(f"{side}_misses") / pl.col(f"{side}_accesses")).alias(side)
        for side in ("live", "replayed")
    )


def _heading(row: dict[str, object]) -> str:
    kind = "may not differ" if row["exact"] else "open loop"
    return f"{row['name']} ({kind}): {row['verdict']}"


def _note() -> str:
    misses = COUNTERS["misses"].definition.partition(";")[0]
    return (
        f"Miss rate: {misses}, per access. Replayed: the baseline recording under the same policies, "
        "capacity and times. Policies that change the model's output are replayed open loop. Passes of either "
        "phase count, prefill and decode."
    )


def _lines(axes: Axes, points: pl.DataFrame) -> None:
    for side, look in (("replayed", REPLAYED), ("live", LIVE)):
        values = points[side].cast(pl.Float64).fill_null(float("nan")).to_numpy()
        axes.plot(points["layer"].to_numpy(), values, **look, clip_on=False)


def _scale(axes: Axes, points: pl.DataFrame) -> None:
    last = int(points["layer"].to_numpy().max())
    axes.set_xlim(-0.5 - last / 60, last + 0.5 + last / 60)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    highest = points.select(pl.max_horizontal("live", "replayed").max()).item()
    from_zero(axes, float(highest or 0))
