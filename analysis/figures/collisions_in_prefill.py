"""Collisions by layer in prefill, apart from decode: a prompt's pass demands many experts of every layer."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from moereplay.analysis.figures import collisions_by_layer

OPTIONS = {"per": ("miss", "access")}


def draw(frame: pl.DataFrame, per: str) -> Figure:
    """A line per eviction policy over layers; a column of panels per capacity, a row per setting.

    Raises ResultError without a prompt, or if no layer has a miss (or an access) in prefill.
    """
    return collisions_by_layer.draw(frame, phase="prefill", per=per)
