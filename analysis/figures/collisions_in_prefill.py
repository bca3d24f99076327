"""Collisions by layer in prefill, apart from decode: a prompt's pass demands many experts of every layer."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from moereplay.analysis.figures import collisions_by_layer
from moereplay.results.read import layers
from moereplay.results.result import ResultError

OPTIONS = {"per": ("miss", "access")}


def draw(frame: pl.DataFrame, per: str) -> Figure:
    """A line per eviction policy over layers; a column of panels per capacity, a row per setting.

    Raises ResultError without a prompt, or if no layer has a miss (or an access) or a collision in prefill.
    """
    rows = layers(frame).filter(pl.col("phase") == "prefill")
    if not rows.is_empty() and not rows["collisions"].sum():
        raise ResultError("no miss in a prompt's pass is a collision, at any capacity; draw collisions_by_layer")
    return collisions_by_layer.draw(frame, phase="prefill", per=per)
