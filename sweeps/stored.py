"""Stored results as tidy polars frames, whichever command wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moereplay.results import read
from moereplay.results.result import unknown
from moereplay.results.stored import load
from moereplay.sweeps.store import place_of

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

TABLES = {"runs": read.runs, "layers": read.layers, "requests": read.requests}


def read_results(folder: str | Path, table: str = "runs") -> pl.DataFrame:
    """What `replay --out`, `sweep run` or `sweep merge` stored in a folder, or at a URL, as one frame of numbers.

    `table` is "runs" (a row per configuration), "layers" (per configuration, layer and phase) or "requests" (per
    configuration and request). Columns: settings, then counters; what ends in `_ns` is in nanoseconds.
    Raises ResultError if there is none, or naming the file that is damaged.
    """
    if table not in TABLES:
        raise unknown("table", table, TABLES)
    return TABLES[table](load(place_of(str(folder)).local()))
