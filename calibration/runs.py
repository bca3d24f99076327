"""A row of evidence as a run that can be priced: what a token reads, misses and computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moereplay.calibration.columns import CELLS
from moereplay.calibration.files import Evidence, Line, Series
from moereplay.calibration.refusal import RefusalError
from moereplay.calibration.sizes import MIB, Sizes, sizes_of
from moereplay.simulator.errors import ConfigError

#: What `clean` says of rows whose time means nothing.
NO_TIME = "hits and bytes only"
#: What it says of rows whose time is not the machine's: page faults, throttling, paging.
FOREIGN_TIME = (
    *("use hits, bytes", "compute is mostly fault service", "compute inflated", "compute is throttled"),
    *("paging", "machine pages", "do not compare"),
)
TIMES = ("tpot_median_ms", "tpot_ms", "tok_s")
OFF = "cache off"
#: Columns that are of a whole run, and not of some of its tokens.
AMOUNTS_OF_ALL = (*TIMES, "compute_ms", "io_ms", "stall_ms", "mgmt_ms", "hit_pct", "read_mib_per_token")


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
        return self.missed_bytes / self.demand_bytes

    @property
    def foreign_time(self) -> str | None:
        """What is wrong with the run's time, in the words of its row; None if nothing is."""
        said = self.cell.text("clean")
        return said if any(words in said for words in FOREIGN_TIME) else None

    def part(self, kept: slice) -> Run:
        """Some of the logged tokens as a run of their own; without published figures. Raises ConfigError if none is."""
        if self.series is None:
            raise ConfigError(f"{self.name} has no log of its tokens")
        cells = {name: text for name, text in self.cell.cells.items() if name not in AMOUNTS_OF_ALL}
        series = self.series.part(kept)
        return replace(self, series=series, missed_bytes=series.read_bytes, cell=replace(self.cell, cells=cells))

    def mean(self, column: str) -> float | None:
        """Milliseconds per token of a column, from the log where there is one, else as published."""
        rows = getattr(self.series, column, None)
        return self._published(column) if rows is None else float(rows.mean())

    def median(self, column: str) -> float | None:
        """The same of the median token."""
        rows = getattr(self.series, column, None)
        return self._published(column) if rows is None else float(np.median(rows))

    def _published(self, column: str) -> float | None:
        return self.cell.amount(column) if column in CELLS else None  # or only logs have it


def run_of(evidence: Evidence, cell: Line) -> Run:
    """The cell as a run. Raises RefusalError with the reason, ConfigError for a file that is wrong."""
    return run_from(cell, evidence.model(cell), evidence.series(cell))


def run_from(cell: Line, model: Line | None, series: Series | None) -> Run:
    """The same of a row, its model's row and its log."""
    _refuse_untimed(cell, series)
    sizes = sizes_of(cell, model)
    said = cell.amount("token_demand_mib")
    demand = said * MIB if said else sizes.demand_bytes
    return Run(
        name=cell.text("cell"),
        device=cell.text("device"),
        cell=cell,
        sizes=sizes,
        series=series,
        lanes=int(cell.amount("lanes") or 0) or None,
        serial=cell.text("overlap") == "no",
        cached=OFF not in cell.text("policy") and cell.amount("cache_mib") != 0,
        demand_bytes=demand,
        missed_bytes=_missed(cell, demand, series),
    )


def _refuse_untimed(cell: Line, series: Series | None) -> None:
    if NO_TIME in cell.text("clean"):
        raise RefusalError(f"its row says {NO_TIME!r}")
    if series is None and not any(cell.amount(name) for name in TIMES):
        raise RefusalError("no time per decoded token is published")
    if "CPU" in cell.text("policy"):
        raise RefusalError(f"misses are computed on the CPU ({cell.text('policy')}), which needs a replay")
    if "page cache" in cell.text("engine") + cell.text("policy"):
        raise RefusalError("the kernel's page cache is its cache, which no price describes")


def _missed(cell: Line, demand: float, series: Series | None) -> np.ndarray:
    """Bytes that decoded tokens fetched: as logged, as published, or from the published hits. 0 is a measurement."""
    if cell.text("prefetch") not in ("", "none"):
        raise RefusalError(f"it prefetches ({cell.text('prefetch')}): what it read does not tell what it waited for")
    if series is not None:
        return series.read_bytes
    read = cell.amount("read_mib_per_token")
    if read is not None:
        return np.array([read * MIB])
    if OFF in cell.text("policy"):
        return np.array([demand])
    hits = cell.amount("hit_pct")
    if hits is None:
        raise RefusalError("neither its hits nor its bytes are published")
    return np.array([demand * (1 - hits / 100)])
