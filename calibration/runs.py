"""A row of evidence as a run that can be priced: what a token reads, misses and computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.folder import Evidence
from calibration.refusal import Refusal
from calibration.rows import Line
from calibration.series import Series
from calibration.sizes import MIB, Sizes, sizes_of

#: What `clean` says of rows whose time means nothing.
NO_TIME = "hits and bytes only"
#: What it says of rows whose time is not the machine's: page faults, throttling, paging.
FOREIGN_TIME = ("use hits, bytes", "compute is mostly fault service", "paging", "machine pages", "do not compare")
OFF = "cache off"
SKIPPED = "skipped"  #: what notes say where misses are dropped


@dataclass(frozen=True)
class Run:
    """One cell: its sizes, its settings, and what was logged of it."""

    name: str
    device: str
    cell: Line
    sizes: Sizes
    series: Series | None
    lanes: int | None
    serial: bool  #: reads first, then computes
    cached: bool  #: experts are kept: pages are committed for those that come, released for those that leave
    demand_bytes: float  #: of experts that a token computes
    missed_bytes: np.ndarray  #: (T,) read by each decoded token, or (1,) their mean

    @property
    def missed_share(self) -> np.ndarray:
        """(T,) of the demanded bytes."""
        return self.missed_bytes / self.sizes.demand_bytes

    @property
    def foreign_time(self) -> str | None:
        """What is wrong with the run's time, in the words of its row; None if nothing is."""
        said = self.cell.text("clean")
        return said if any(words in said for words in FOREIGN_TIME) else None

    def mean(self, column: str) -> float | None:
        """Milliseconds per token of a column, from the log where there is one, else as published."""
        rows = getattr(self.series, column, None)
        return self.cell.amount(column) if rows is None else float(rows.mean())

    def median(self, column: str) -> float | None:
        """The same of the median token."""
        rows = getattr(self.series, column, None)
        return self.cell.amount(column) if rows is None else float(np.median(rows))


def run_of(evidence: Evidence, cell: Line) -> Run:
    """The cell as a run. Raises Refusal with the reason, ConfigError for a file that is wrong."""
    _refuse_untimed(cell)
    sizes = sizes_of(cell, evidence.model(cell))
    series = evidence.series(cell)
    demand = cell.amount("token_demand_mib")
    return Run(
        name=cell.text("cell"),
        device=cell.text("device"),
        cell=cell,
        sizes=sizes,
        series=series,
        lanes=int(cell.amount("lanes") or 0) or None,
        serial=cell.text("overlap") == "no",
        cached=OFF not in cell.text("policy") and cell.amount("cache_mib") != 0,
        demand_bytes=demand * MIB if demand else sizes.demand_bytes,
        missed_bytes=_missed(cell, sizes, series),
    )


def _refuse_untimed(cell: Line) -> None:
    if NO_TIME in cell.text("clean"):
        raise Refusal(f"its row says {NO_TIME!r}")
    if cell.amount("tpot_ms") is None and cell.amount("tpot_median_ms") is None and cell.amount("tok_s") is None:
        raise Refusal("no time per decoded token is published")
    if "CPU" in cell.text("policy"):
        raise Refusal(f"misses are computed on the CPU ({cell.text('policy')}), which needs a replay")
    if "page cache" in cell.text("engine") + cell.text("policy"):
        raise Refusal("the kernel's page cache is its cache, which no price describes")


def _missed(cell: Line, sizes: Sizes, series: Series | None) -> np.ndarray:
    """Bytes that decoded tokens fetched: as logged, as published, or from the published hits."""
    if series is not None and series.read_bytes.any():
        return series.read_bytes
    if read := cell.amount("read_mib_per_token"):
        return np.array([read * MIB])
    if OFF in cell.text("policy"):
        return np.array([sizes.demand_bytes])
    hits = cell.amount("hit_pct")
    if hits is None:
        raise Refusal("neither its hits nor its bytes are published")
    if cell.text("prefetch") not in ("", "none"):
        raise Refusal(f"it prefetches ({cell.text('prefetch')}): its hits do not tell what it waits for")
    return np.array([sizes.demand_bytes * (1 - hits / 100)])
