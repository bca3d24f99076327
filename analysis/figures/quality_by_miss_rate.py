"""Quality against the miss rate: Cache-Conditional Experts, Figs. 4 to 6, from a model's own runs."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from moereplay.analysis.figures.quality_panels import Axis, draw_against

OPTIONS: dict[str, tuple[str, ...]] = {}
MISSES = Axis("What fewer misses cost", "miss rate", lambda row: row["live_miss_rate"], more_is_better=False)


def draw(frame: pl.DataFrame) -> Figure:
    """Loss over miss rate. Raises ResultError where no task has both."""
    return draw_against(frame, MISSES)
