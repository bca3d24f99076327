"""Quality against tokens per second, which are simulated."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from moereplay.analysis.figures.quality_panels import Axis, draw_against
from moereplay.results.result import Row

OPTIONS: dict[str, tuple[str, ...]] = {}


def draw(frame: pl.DataFrame) -> Figure:
    """Loss over tokens per second. Raises ResultError where no task has both."""
    return draw_against(frame, Axis("What more speed costs", "tokens/s, SIMULATED", _speed, more_is_better=True))


def _speed(row: Row) -> float | None:
    return 1000 / row["live_tpot_ms"] if row["live_tpot_ms"] else None
